"""Facts of a job: its plan, profile, schedule and measurements.

In: the job's step runner. Out: values and reports; nothing is changed.
"""

from __future__ import annotations

from pathlib import Path

import torch

from memfit.core.errors import PeerError, UnsupportedError, UsageError
from memfit.core.numerics import Numerics
from memfit.core.plan import Plan
from memfit.core.profile import Profile
from memfit.core.schedule import Schedule
from memfit.core.step_report import html_table
from memfit.job.assembly import Assembly
from memfit.job.reporting import predicted_phases, subject_of_job
from memfit.job.step_runner import StepRunner
from memfit.machine.leak_report import CensusReport
from memfit.machine.proof import Proof
from memfit.planner.together import together
from memfit.report.page import render_page, write_report
from memfit.report.perfetto import render_perfetto
from memfit.report.subject import ReportSubject
from memfit.runs.checkpointer import CommitReport


class JobFacts:
    """Facts of a job.

    Args:
        runner: makes the job's steps.

    Attributes:
        loss_scaler: the dynamic loss scale of a plan that computes in fp16; part of every commit.
            None for other plans.
        breaches: plans that were exchanged under `on_breach="replan"`, with their causes.
        compared: the first steps beside their prediction: `compared.result()` is None until five
            steps were made, and where steps are not measured.
    """

    def __init__(self, runner: StepRunner) -> None:
        self.loss_scaler = runner.scaler
        self.breaches = runner.breaches
        self.compared = runner.compared
        self._runner = runner
        self._machine = runner.machine
        self._was_closed = False

    @property
    def _assembly(self) -> Assembly:
        return self._runner.assembly

    @property
    def _is_closed(self) -> bool:
        return self._was_closed or self._runner.has_ended

    def _check_open(self) -> Assembly:
        if self._is_closed:
            raise UsageError(
                "the job is closed; its model and optimizer are ordinary ones again. memfit.fit makes a new job"
            )
        ranks = self._assembly.setup.ranks
        if ranks is not None and ranks.failure is not None:
            raise PeerError(
                f"the job is over on all ranks ({ranks.failure}): what other ranks held of it cannot be reached. Close it, and fit again"
            )
        return self._assembly

    def __repr__(self) -> str:
        if self._is_closed:
            return f"<memfit.Job, closed after step {self.steps}>"
        plan, proof = self._assembly.planned.reason.rstrip("."), self.proof().line().removeprefix("proof: ")
        return f"<memfit.Job at step {self.steps}; plan: {plan}; {proof}>"

    def _repr_html_(self) -> str:
        """Shows in a notebook the steps so far, the reason of the plan, and the proof."""
        facts = [
            ("steps", str(self.steps)),
            ("state", "closed" if self._is_closed else "live"),
            ("plan", self._assembly.planned.reason.rstrip(".")),
            ("numerics", self.numerics.short()),
        ]
        return html_table("memfit.Job", facts) + self.proof()._repr_html_()

    # --- the plan --------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan: given, the run's own, or the fastest that fits.

        Changes if `on_breach="replan"` makes another.
        """
        return self._assembly.plan

    @property
    def reason(self) -> str:
        """Reason of the plan, and its effect on the numbers."""
        planned = self._assembly.planned
        return f"{planned.reason} {planned.numerics.sentence()}"

    @property
    def numerics(self) -> Numerics:
        """Effect of the plan on the numbers: exact, reordered or approximate.

        Which sums are regrouped, and why. Prints as text.
        """
        return self._assembly.planned.numerics

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak of the process without a GPU, else of the device, in a steady step."""
        return self._assembly.planned.predicted_peak_bytes

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks, in the order of their first call."""
        return tuple(block.name for block in self._assembly.blocks)

    @property
    def profile(self) -> Profile:
        """Profile of the sample's shapes."""
        return self._assembly.planned.prepared.profile

    @property
    def schedule(self) -> Schedule:
        """The step as a list of actions; `.text()` returns it as text."""
        return self._assembly.planned.prepared.step.schedule

    # --- the run ---------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Steps made in the run so far: since `fit`, or, with `store=` or `load_states`, since the
        run began.

        A loop over `range(job.steps, total)` goes on.
        """
        return self._assembly.steps

    @property
    def commits(self) -> CommitReport | None:
        """State and cost of committing; None without `store=`."""
        return self._assembly.checkpointer.report()

    @property
    def bytes_moved(self) -> tuple[dict[str, int], dict[str, int]]:
        """(read, written) bytes of the disk since the job began, by purpose."""
        return self._assembly.house.bytes_moved

    def gradient(self, name: str) -> torch.Tensor | None:
        """Copies a parameter's gradient of the last step (needs `fit(keep_gradients=True)`); None
        if it got none.
        """
        with self._runner.calls.enter("job.gradient"):
            assembly = self._check_open()
            if not assembly.setup.keeps_gradients:
                raise UsageError(
                    "gradients are given up after the update; fit(keep_gradients=True) keeps them readable"
                )
            if name not in assembly.place:
                raise UsageError(f"no parameter is called {name!r:.80}; names are those of model.named_parameters()")
            block, slot = assembly.place[name]
            with together(assembly.setup.ranks, f"job.gradient({name!r})"):
                return assembly.house.gradients.read(block, slot)

    def proof(self, *, before_bytes: int = 0) -> Proof:
        """Returns the limit, the predicted peak, and the measured peak over all phases so far.

        `proof.table()` tells them phase by phase: load or resume, first step, steady, evaluate,
        save. `proof.data()` is the same as JSON values.

        Args:
            before_bytes: a peak that was measured before `fit`, to be included.
        """
        return Proof(
            limit_bytes=self._machine.limits.device_bytes,
            predicted_peak_bytes=self.predicted_peak_bytes,
            measured_peak_bytes=max(before_bytes, self._machine.measured_peak_bytes()),
            phases=self._machine.phases.records,
            numerics=self.numerics,
            predicted=predicted_phases(self._assembly),
            counts_process=self._machine.counts_process,
        )

    def report(
        self, path: str | Path, *, title: str | None = None, perfetto: str | Path | None = None
    ) -> ReportSubject:
        """Writes a report on the job's step as an HTML page: predicted memory and time, action by
        action, with the last measured step on top.

        See `memfit report`. The page is one file and needs no network.

        Args:
            path: the page.
            title: of the page; None: the class of the model.
            perfetto: writes the step here too, as a trace that ui.perfetto.dev opens.

        Returns:
            The subject of the report, as data.

        Raises:
            UsageError: a file cannot be written.
        """
        planned = self._assembly.planned
        name = type(planned.setup.problem.model).__name__ if title is None else title
        subject = subject_of_job(
            planned,
            self._runner.measured,
            title=name,
            comparison=self._runner.compared.result(),
            proof=self.proof(),
        )
        write_report(path, render_page(subject))
        if perfetto is not None:
            write_report(perfetto, render_perfetto(subject))
        return subject

    def census(self) -> CensusReport:
        """Reports what lives from step to step: tensors that survive and who holds them, callbacks
        that keep too much alive.

        Prints as text; `.warn()` warns. Live bytes and blocks are recorded at the end of each step.
        The call takes milliseconds while they are constant; otherwise seconds, and it may run the
        garbage collector.
        """
        return self._runner.census()


# End of a job, and what a job on several ranks cannot do.
#
# In: an assembly. Out: the model and the optimizer, whole again; or a refusal.


def check_alone(assembly: Assembly, call: str) -> None:
    """Refuses on several ranks what reads weights as it goes, which would be collective."""
    if assembly.setup.ranks is not None:
        raise UnsupportedError(
            f"{call} is for one process: on several ranks, close the job and use the model, which is whole again"
        )


def end_job(assembly: Assembly, *, restore: bool) -> None:
    """Gives everything of a job back, or gives it up; on several ranks together."""
    ranks = assembly.setup.ranks
    if ranks is None or assembly.has_ended:
        assembly.end(restore=restore)
        return
    # A group that has failed brings nothing back: what other ranks hold cannot be reached.
    is_whole = restore and ranks.failure is None
    if is_whole:
        try:
            with together(ranks, "job.close"):
                assembly.end(restore=True)
        except PeerError:
            if ranks.failure is not None:
                # Another rank was lost meanwhile: what is left here goes as well.
                end_job(assembly, restore=False)
            raise
    # First the group: until it is gone, collectives may still write to this job's memory.
    is_gone = ranks.close()
    if not is_whole and is_gone:
        for block in assembly.blocks:
            block.release(forgets_arrival=True)
        assembly.end(restore=False)
    elif not is_gone:
        assembly.machine.hard_limit.disarm()
        if assembly.setup.run is not None:
            # Memory stays until the group is gone; files need not wait for that.
            assembly.setup.run.close()
