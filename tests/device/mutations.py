"""Every ordering of memfit's accelerator path, taken out one at a time, and the test that notices.

See `accelerator/mutants.py` for what a mutation is. Whoever adds a wait, a keep-alive or an order to memfit adds its mutation here, with the cheapest test
that notices it; one that takes a whole training run to notice is slow. Without `--slow` some 55 are tried, in 15 s of one core; with it all, in 45 s.
"""

from __future__ import annotations

from accelerator.mutants import Mutation

IMPORTS = ("accelerator.late", "torch._dynamo", "memfit.api", "transformers.models.llama.modeling_llama")

ORDER, TRAINING, INFERENCE = (
    "test_device_order.py::test_",
    "test_device_training.py::test_",
    "test_device_inference.py::test_",
)

DROPPED = ORDER + "a_transfer_that_is_dropped_before_anyone_waited_keeps_its_memory[late]"
ELSEWHERE = ORDER + "a_model_on_another_index_than_the_current_one_trains_as_plain[late-host]"
LOSS_ON_CPU = ORDER + "microbatches_with_a_loss_on_the_cpu_run_back_in_order[late-False-keep-loss_here]"
VARIABLES = ORDER + "recomputation_in_the_device_thread_meets_context_variables[late-1-recompute]"
MOVED, WAITS = "test_device_transfers.py::test_", "test_device_waits.py::test_"
TRAVELS = MOVED + "what_travels_is_what_stays_and_all_transfers_are_waited_for[late-{}]"
OUT = MOVED + "a_block_that_moves_out_has_its_values[late-{}]"
MOVES = WAITS + "a_block_moves_after_its_update[{}]"
NOBODY = WAITS + "a_saved_tensor_that_nobody_needs_any_more_ends_its_transfer_first[late-{}]"
PLAIN = TRAINING + "training_on_a_device_equals_plain_pytorch_bit_for_bit[late-{}]"
TOKENS = INFERENCE + "generation_on_a_device_gives_the_tokens_of_transformers[late-{}]"

_MEMORY, _TIERS = "memfit.runtime.homes.memory:", "memfit.runtime.saved.tiers:"
_UPDATES, _PIECES = "memfit.runtime.updates:", "memfit.runtime.update_pieces:"

DEVICES = (
    Mutation(
        says="the current stream is that of the current device, not of the copy's",
        where="memfit.devices.accelerator:Accelerator.current_stream",
        take="current_stream(device)",
        put="current_stream()",
        tests=[MOVED + "a_copy_leaves_the_threads_stream_and_device_as_they_were[late]", ELSEWHERE],
    ),
    Mutation(
        says="a thread that was on the copy stream stays there",
        where="memfit.devices.accelerator:Accelerator.on",
        take="torch.accelerator.set_stream(before)",
        put="pass",
        tests=[MOVED + "a_copy_leaves_the_threads_stream_and_device_as_they_were[late]"],
        shows=r"== \[True, True\]",
    ),
    Mutation(
        says="what was the current device before the copy stream is forgotten",
        where="memfit.devices.accelerator:Accelerator.on",
        take="torch.accelerator.set_device_index(device_index)",
        put="pass",
        tests=[MOVED + "a_copy_leaves_the_threads_stream_and_device_as_they_were[late]"],
        shows=r"== \[True, True\]",
    ),
    Mutation(
        says="threads share the note of which stream they came from",
        where="memfit.devices.accelerator:Accelerator.on",
        take="torch.accelerator.set_stream(stream)\ntry:\n    yield\nfinally:".replace("\n", "\n    "),
        put="with stream:\n    yield\nif False:",
        tests=[MOVED + "threads_that_share_the_copy_stream_come_back_to_their_own[late]"],
        shows=r"== \[True, True\]",
    ),
)

TRANSFERS = (
    Mutation(
        says="a copy home does not wait for the kernels that make its source",
        where=_MEMORY + "MemoryHome._copy",
        take="self._stream.wait_stream(",
        put="source.device.type == 'cpu' and self._stream.wait_stream(",
        tests=[MOVED + "a_copy_home_is_behind_what_made_it_and_before_what_comes_after[late]"],
    ),
    Mutation(
        says="a copy to the device does not wait for the kernels that still read the memory",
        where=_MEMORY + "MemoryHome._copy",
        take="self._stream.wait_stream(",
        put="to.device.type == 'cpu' and self._stream.wait_stream(",
        tests=[MOVED + "a_copy_to_the_device_is_behind_what_used_the_memory_and_before_what_reads_it[late]"],
    ),
    Mutation(
        says="the event of a copy is recorded before the copy",
        where=_MEMORY + "MemoryHome._copy",
        take="to.copy_(source, non_blocking=True)\n        event = self._stream.record_event()",
        put="event = self._stream.record_event()\nto.copy_(source, non_blocking=True)",
        tests=[MOVED + "a_copy_to_the_device_is_behind_what_used_the_memory_and_before_what_reads_it[late]"],
    ),
    Mutation(
        says="nobody waits for a copy",
        where=_MEMORY + "CopyTicket.wait",
        take="devices.of(device).current_stream(device).wait_event(self._event)",
        put="pass",
        tests=[MOVED + "a_copy_to_the_device_is_behind_what_used_the_memory_and_before_what_reads_it[late]"],
    ),
    Mutation(
        says="a ticket keeps nothing alive",
        where=_MEMORY + "CopyTicket.__init__",
        take="= keep",
        put="= ()",
        tests=[MOVED + "memory_under_a_copy_goes_with_its_ticket[late]"],
    ),
    Mutation(
        says="a ticket lets its memory go before the stream is ordered",
        where=_MEMORY + "CopyTicket.wait",
        take="device = self._stream.device",
        put="device, self._keep = self._stream.device, ()",
        tests=[MOVED + "memory_under_a_copy_goes_with_its_ticket[late]"],
    ),
    Mutation(
        says="a ticket that is dropped does not name its stream to the allocator",
        where=_MEMORY + "CopyTicket.__del__",
        take="bytes_view(storage, 0, storage.nbytes()).record_stream(self._stream)",
        put="pass",
        tests=[DROPPED],
    ),
    Mutation(
        says="pinned memory is given up under copies",
        where=_MEMORY + "MemoryHome.close",
        take="device.synchronize(self._device)",
        put="pass",
        tests=[MOVED + "pinned_memory_is_given_up_when_its_copies_are_done[late]"],
    ),
    Mutation(
        says="several transfers are waited for up to the first that fails",
        where="memfit.runtime.homes.base:Tickets.wait",
        take="first = first or error",
        put="raise",
        tests=[MOVED + "all_transfers_are_waited_for_though_one_fails[late]"],
    ),
    Mutation(
        says="what follows a transfer is done without it",
        where="memfit.runtime.homes.base:Then.wait",
        take="ticket.wait()",
        put="pass",
        tests=[TRAVELS.format("whole-disk")],
        shows=r"races|== \[True\]",
        is_slow=True,
    ),
)

WEIGHTS = (
    Mutation(
        says="weights are used before they have come",
        where="memfit.runtime.weights:BlockWeights.wait",
        take="arriving.wait()",
        put="pass",
        tests=[OUT.format("True")],
    ),
    Mutation(
        says="a visit that nobody used gives its memory up under the copy",
        where="memfit.runtime.weights:BlockWeights.release",
        take="arriving.wait()",
        put="pass",
        tests=[MOVED + "a_visit_that_nobody_used_ends_after_its_copy[late]"],
    ),
    Mutation(
        says="a block gives its memory up under the copy that brings it",
        where="memfit.runtime.weights:BlockWeights.give_up",
        take="self._arriving.wait()",
        put="pass",
        tests=[MOVED + "a_visit_that_is_broken_off_ends_its_transfer_while_it_has_memory[late-give_up]"],
        shows=r"assert \[\] == ",
    ),
    Mutation(
        says="parameters that move out are not waited for",
        where="memfit.runtime.weights:BlockWeights.move_out",
        take=".untyped_storage()).wait()",
        put=".untyped_storage())",
        tests=[OUT.format("False")],
    ),
    Mutation(
        says="a block moves out while it comes",
        where="memfit.runtime.weights:BlockWeights.move_out",
        take="self.wait()",
        put="pass",
        tests=[OUT.format("True")],
    ),
    Mutation(
        says="parameters that move in are freed under their copies",
        where="memfit.runtime.weights:_put",
        take="write_tensor(home, slot.offset_bytes, dense).wait()",
        put="write_tensor(home, slot.offset_bytes, dense)",
        tests=[TRAVELS.format("summed-host")],
        shows=r"unawaited|== \[\]",
        is_slow=True,
    ),
    Mutation(
        says="a block is used at its calls before it has come",
        where="memfit.runtime.visits:Visits.ensure",
        take="block.wait()",
        put="pass",
        tests=[MOVES.format("ensure")],
        shows=r"'wait'",
    ),
    Mutation(
        says="a block is fetched while it is updated",
        where="memfit.runtime.visits:Visits.fetch",
        take="self._settle(b)",
        put="pass",
        tests=[MOVES.format("fetch")],
        shows=r"'settle'",
    ),
    Mutation(
        says="a block is released while it is updated",
        where="memfit.runtime.visits:Visits.release",
        take="self._settle(b)",
        put="pass",
        tests=[MOVES.format("release")],
        shows=r"'settle'",
    ),
    Mutation(
        says="a block that is needed at once is fetched while it is updated",
        where="memfit.runtime.visits:Visits.ensure",
        take="self._settle(b)",
        put="pass",
        tests=[MOVES.format("ensure")],
        shows=r"'settle'",
    ),
)

GRADIENTS = (
    Mutation(
        says="gradients that left are forgotten",
        where="memfit.runtime.gradients:GradientHomes.accumulate",
        take="self._leaving = Tickets(tickets)",
        put="self._leaving = None",
        tests=[TRAVELS.format("summed-host")],
        shows=r"== \[\]",
        is_slow=True,
    ),
    Mutation(
        says="a gradient that came home before is added before it is here",
        where="memfit.runtime.gradients:_add_home",
        take=".untyped_storage()).wait()",
        put=".untyped_storage())",
        tests=[TRAVELS.format("summed-host")],
        shows=r"races|== \[True\]",
        is_slow=True,
    ),
    Mutation(
        says="a gradient's piece is used before it has come",
        where="memfit.runtime.gradients:GradientHomes.finish_piece",
        take="piece.ready.wait()",
        put="pass",
        tests=[TRAVELS.format("summed-host")],
        shows=r"races|== \[True\]",
        is_slow=True,
    ),
    Mutation(
        says="a gradient is read before it has come",
        where="memfit.runtime.gradients:GradientHomes.read",
        take=".untyped_storage()).wait()",
        put=".untyped_storage())",
        tests=[TRAVELS.format("summed-host")],
        shows=r"races|== \[True\]",
        is_slow=True,
    ),
    Mutation(
        says="widened pieces of a gradient go home without one waiting for the other",
        where="memfit.runtime.weights:begin_write_masters",
        take="Tickets(tickets).wait()",
        put="pass",
        tests=[TRAVELS.format("whole-host")],
        shows=r"== \[\]",
        is_slow=True,
    ),
)

UPDATES = (
    Mutation(
        says="the update worker has a stream of its own",
        where=_UPDATES + "_Job.__init__",
        take="devices.of(device).current_stream(device) if devices.is_accelerator(device) else None",
        put="None",
        tests=[MOVED + "updates_of_a_step_inside_a_stream_use_that_stream_alone[late]"],
    ),
    Mutation(
        says="an update's bytes come on the worker's stream",
        where=_UPDATES + "_Job.begin",
        take="with self._in_order():",
        put="if True:",
        tests=[MOVED + "updates_of_a_step_inside_a_stream_use_that_stream_alone[late]"],
        is_slow=True,
    ),
    Mutation(
        says="an update computes on the worker's stream",
        where=_UPDATES + "_Job.apply",
        take="with self._in_order():",
        put="if True:",
        tests=[MOVED + "updates_of_a_step_inside_a_stream_use_that_stream_alone[late]"],
        is_slow=True,
    ),
    Mutation(
        says="an update ends on the worker's stream",
        where=_UPDATES + "_Job._end",
        take="with self._in_order():",
        put="if True:",
        tests=[MOVED + "updates_of_a_step_inside_a_stream_use_that_stream_alone[late]"],
        is_slow=True,
    ),
    Mutation(
        says="an update does not wait for what it shall come after",
        where=_UPDATES + "_Job.apply",
        take="self._after.wait()",
        put="pass",
        tests=[WAITS + "an_update_changes_nothing_before_its_gate_opens"],
        shows="applied",
    ),
    Mutation(
        says="pieces that go home are not waited for",
        where=_UPDATES + "_Job.apply",
        take="Tickets(before).wait()",
        put="pass",
        tests=[TRAVELS.format("summed-host")],
        shows=r"== \[\]",
        is_slow=True,
    ),
    Mutation(
        says="the last piece that goes home is not waited for",
        where=_UPDATES + "_Job._end",
        take="Tickets(self._leaving).wait()",
        put="pass",
        tests=[TRAVELS.format("summed-host")],
        shows=r"== \[\]",
        is_slow=True,
    ),
    Mutation(
        says="nobody waits for an update",
        where=_UPDATES + "UpdateTicket.wait",
        take="try:\n        self._done.wait()",
        put="try:\n    pass",
        tests=[PLAIN.format("1-keep-host")],
        shows=r"died of signal 11|races|equal",
        is_slow=True,
    ),
    Mutation(
        says="the weights of an update are used before they have come",
        where=_PIECES + "PieceUpdates.apply",
        take="coming.ready.wait()",
        put="pass",
        tests=[TRAVELS.format("whole-host")],
        shows=r"races|== \[True\]",
        is_slow=True,
    ),
    Mutation(
        says="the states of an update are used before they have come",
        where=_PIECES + "PieceUpdates.apply",
        take="state.ready.wait()",
        put="pass",
        tests=[TRAVELS.format("summed-host")],
        shows=r"races|== \[True\]",
        is_slow=True,
    ),
    Mutation(
        says="a block is updated while a visit that nobody used still comes",
        where="memfit.runtime.settling:Settling.do",
        take="self._blocks[b].wait()",
        put="pass",
        tests=[WAITS + "a_visit_that_nobody_waited_for_ends_before_the_update_begins"],
        shows=r"'accumulate', 'wait', 'submit'",
    ),
    Mutation(
        says="an update reads gradients that have not left",
        where="memfit.runtime.settling:Settling.do",
        take="self._gradients.wait()",
        put="pass",
        tests=[WAITS + "an_update_does_not_begin_where_a_gradient_could_not_be_written"],
        shows=r"DID NOT RAISE",
    ),
    Mutation(
        says="gradients are cleared under their update",
        where="memfit.runtime.settling:Settling.do",
        take="self.wait(b)\n            self._gradients.clear",
        put="self._gradients.clear",
        tests=[WAITS + "gradients_are_cleared_and_a_step_ends_after_the_updates"],
        shows=r"'updated'",
    ),
    Mutation(
        says="a step ends before its updates",
        where="memfit.runtime.settling:Settling.do",
        take="for b in tuple(self._updating):\n                self.wait(b)",
        put="pass",
        tests=[WAITS + "gradients_are_cleared_and_a_step_ends_after_the_updates"],
        shows=r"'updated'",
    ),
    Mutation(
        says="split masters are joined before their pieces have come",
        where="memfit.runtime.split:SplitMasters._read",
        take="Tickets(coming)",
        put="Tickets([])",
        tests=[TRAVELS.format("split-host")],
        shows=r"races|== \[True\]",
        is_slow=True,
    ),
    Mutation(
        says="differences of split masters go home without one waiting for the other",
        where="memfit.runtime.split:SplitMasters.write",
        take="Tickets(tickets).wait()",
        put="pass",
        tests=[TRAVELS.format("split-host")],
        shows=r"== \[\]",
        is_slow=True,
    ),
)

SAVED = (
    Mutation(
        says="saved tensors are dropped under the copy that takes them away",
        where=_TIERS + "HostStore.wait",
        take="rest.written.wait()",
        put="pass",
        tests=[WAITS + "a_saved_tensor_leaves_the_device_and_comes_back[late]"],
        shows=r"allocated",
    ),
    Mutation(
        says="saved tensors are used before they have come back",
        where="memfit.runtime.saved.offload:Parcel.bring",
        take="self._ticket.wait()",
        put="pass",
        tests=[WAITS + "a_saved_tensor_leaves_the_device_and_comes_back[late]"],
    ),
    Mutation(
        says="saved tensors are given up before they have left",
        where="memfit.runtime.saved.offload:Parcel.drop",
        take="self._store.wait(self._rest)",
        put="pass",
        tests=[WAITS + "a_saved_tensor_leaves_the_device_and_comes_back[late]"],
        shows=r"allocated",
    ),
    Mutation(
        says="saved tensors that come back when nobody needs them are freed under the copy",
        where="memfit.runtime.saved.offload:Parcel.__del__",
        take="self._ticket.wait()",
        put="pass",
        tests=[NOBODY.format("back")],
        shows=r"ended",
    ),
    Mutation(
        says="saved tensors that leave when nobody needs them are freed under the copy",
        where="memfit.runtime.saved.offload:Parcel.__del__",
        take="self._store.wait(self._rest)",
        put="pass",
        tests=[NOBODY.format("away")],
        shows=r"ended",
    ),
    Mutation(
        says="staging for the disk does not wait for compute",
        where=_TIERS + "StagedScratchStore._copy",
        take="self._stream.wait_event(ready)",
        put="pass",
        tests=[WAITS + "staging_copies_behind_compute_and_before_it[late]"],
    ),
    Mutation(
        says="staging for the disk waits for another stream than the caller's",
        where=_TIERS + "StagedScratchStore._now",
        take="devices.of(device).current_stream(device)",
        put="self._stream",
        tests=[WAITS + "staging_copies_behind_compute_and_before_it[late]"],
    ),
    Mutation(
        says="staging is written, or used again, before its copy is done",
        where=_TIERS + "StagedScratchStore._copy",
        take="event.synchronize()",
        put="pass",
        tests=[WAITS + "staging_copies_behind_compute_and_before_it[late]"],
        shows=r"races|sum",
    ),
    Mutation(
        says="staging's event is recorded before its copy",
        where=_TIERS + "StagedScratchStore._copy",
        take="target.copy_(source, non_blocking=True)\n        event = self._stream.record_event()",
        put="event = self._stream.record_event()\ntarget.copy_(source, non_blocking=True)",
        tests=[WAITS + "staging_copies_behind_compute_and_before_it[late]"],
        shows=r"races|sum",
    ),
    Mutation(
        says="staging is used again before it is written",
        where=_TIERS + "StagedScratchStore._write",
        take="extent.written.wait()",
        put="pass",
        tests=[WAITS + "staging_is_used_again_when_it_is_written[late]"],
        shows=r"sum",
    ),
    Mutation(
        says="staging is copied before it is read",
        where=_TIERS + "StagedScratchStore._read",
        take='label="saved tensor").wait()',
        put='label="saved tensor")',
        tests=[WAITS + "staging_copies_behind_compute_and_before_it[late]"],
        shows=r"races|sum",
    ),
    Mutation(
        says="what staging takes away may be given up before it is copied",
        where=_TIERS + "StagedScratchStore.wait",
        take="rest.left.result()",
        put="pass",
        tests=[WAITS + "what_staging_takes_away_stays_until_it_is_copied[late]"],
        shows=r"races|sum",
    ),
    Mutation(
        says="what staging brings back is used before it is here",
        where=_TIERS + "_StagedRead.wait",
        take="self._read.result()",
        put="pass",
        tests=[WAITS + "staging_copies_behind_compute_and_before_it[late]"],
        shows=r"races|sum",
    ),
    Mutation(
        says="staging is unpinned under its copies",
        where=_TIERS + "StagedScratchStore.close",
        take="executor.shutdown(wait=True)",
        put="pass",
        tests=[WAITS + "staging_is_closed_when_all_is_written[late]"],
        shows=r"done",
    ),
    Mutation(
        says="saved tensors of a device have no way to the disk",
        where="memfit.runtime.housing:House.tier_stores",
        take="if self.scratch is not None and not devices.is_accelerator(self._device):",
        put="if self.scratch is not None:",
        tests=[PLAIN.format("1-offload-disk")],
        shows=r"disk transfers need memory",
    ),
)

THREADS = (
    Mutation(
        says="losses on the CPU are roots of the joint backward",
        where="memfit.runtime.crossing:differentiate_on_host",
        take="if not _is_on_host(loss.grad_fn):",
        put="if True:",
        tests=[LOSS_ON_CPU],
        shows=r"departures|where the schedule had passed",
    ),
    Mutation(
        says="detours over the CPU are let through",
        where="memfit.runtime.crossing:refuse_detours",
        take="if _is_on_host(node):",
        put="if False:",
        tests=[ORDER + "a_detour_over_the_cpu_is_refused_for_microbatches_that_take_turns[late]"],
        shows="DID NOT RAISE|Unsupported",
        is_slow=True,
    ),
    Mutation(
        says="recomputation has the context variables of autograd's thread",
        where="memfit.runtime.saved.surroundings:Surroundings.run",
        take="self._context.copy().run(call, *args, **kwargs)",
        put="call(*args, **kwargs)",
        tests=[VARIABLES],
    ),
    Mutation(
        says="recomputation draws other random numbers on the device",
        where="memfit.runtime.saved.surroundings:_random_states",
        take="if devices.is_accelerator(device):",
        put="if False:",
        tests=[PLAIN.format("1-recompute-host")],
    ),
    Mutation(
        says="recomputation has the autocast of autograd's thread",
        where="memfit.runtime.saved.surroundings:Switches.restored",
        take="for kind, is_enabled, dtype in self.autocast:",
        put="for kind, is_enabled, dtype in ():",
        tests=[ORDER + "recomputation_in_the_device_thread_meets_the_users_autocast[late]"],
        shows=r"does not do the same when it is recomputed",
        is_slow=True,
    ),
    Mutation(
        says="microbatches share the device's generator",
        where="memfit.runtime.streams:RandomStream.enter",
        take="if accelerator is None:",
        put="if True:",
        tests=[PLAIN.format("4-keep-device")],
        is_slow=True,
    ),
    Mutation(
        says="Ctrl-C is heard in the main thread only",
        where="memfit.api.interrupts:_wake_pipe",
        take="return read",
        put="return None",
        tests=[ORDER + "an_interrupt_in_backward_comes_between_two_blocks[late]"],
        shows="0 not in|==",
    ),
    Mutation(
        says="the generator of the current device is restored, not of the model's",
        where="memfit.api.saving:_restore_random",
        take="devices.of(device).set_rng_state(device, random[1])",
        put="devices.of(device).set_rng_state(torch.device(device.type), random[1])",
        tests=[WAITS + "a_load_restores_the_generator_of_the_models_device[late]"],
    ),
)

LIMITS = (
    Mutation(
        says="a job's limit outlives it",
        where="memfit.api.machine:_lift_limit",
        take="meter.set_limit(None)",
        put="pass",
        tests=[WAITS + "a_job_that_ends_lifts_its_own_limit_and_no_other_jobs[late]"],
        shows=r"limit_bytes",
    ),
    Mutation(
        says="a job lifts another's limit",
        where="memfit.api.machine:_lift_limit",
        take="if meter.limit_bytes() == limit_bytes:",
        put="if True:",
        tests=[WAITS + "a_job_that_ends_lifts_its_own_limit_and_no_other_jobs[late]"],
        shows=r"limit_bytes",
    ),
    Mutation(
        says="the pool of loading counts in the proof",
        where="memfit.api.machine:Machine.forget_peak",
        take="if isinstance(self.meter, AcceleratorMeter):",
        put="if False:",
        tests=[ORDER + "the_proof_does_not_count_what_loading_held[late]"],
        shows="Proof|measured_peak_bytes",
    ),
    Mutation(
        says="the probes' matrices are as large as a small limit",
        where="memfit.api.machine:_probe_flops",
        take="_PROBE_DEVICE_SIZE if",
        put="6144 if",
        tests=[WAITS + "probes_fit_the_reserve_of_every_plan[late]"],
        shows=r"out of memory",
    ),
)

HOST = (
    Mutation(
        says="a save reads pinned memory under its copies",
        where="memfit.runtime.export.files:settle",
        take="devices.of(device).synchronize(device)",
        put="pass",
        tests=[WAITS + "a_save_has_what_the_step_before_it_wrote[late]"],
        shows=r"assert \[True",
        is_slow=True,
    ),
    Mutation(
        says="a commit reads pinned memory under its copies",
        where="memfit.runtime.housing:House._follow_copies",
        take="if devices.is_accelerator(self._device):",
        put="if False:",
        tests=[WAITS + "a_commit_has_what_the_step_before_it_wrote[late]"],
        shows=r"assert \[True",
        is_slow=True,
    ),
    Mutation(
        says="weights that were changed between steps are gone before they are home",
        where="memfit.api.assembly:Assembly.write_home",
        take="ticket.wait()",
        put="pass",
        tests=[TRAVELS.format("whole-host")],
        shows=r"== \[\]",
        is_slow=True,
    ),
)

CACHES = (
    Mutation(
        says="keys and values are used before they have come",
        where="memfit.runtime.caches:_Record.wait",
        take="self._coming.pop().wait()",
        put="self._coming.pop()",
        tests=[WAITS + "a_cache_leaves_the_device_and_is_there_again_when_caches_are_closed[late]"],
    ),
    Mutation(
        says="keys and values are given up before they have left",
        where="memfit.runtime.caches:_Record.leave",
        take="rests.wait(self._rests[storage._cdata][2])",
        put="pass",
        tests=[WAITS + "a_cache_leaves_the_device_and_is_there_again_when_caches_are_closed[late]"],
    ),
    Mutation(
        says="a page of keys and values is given up before it has left",
        where="memfit.runtime.caches:_Record._write_rows",
        take="if pages.rests:",
        put="if False:",
        tests=[WAITS + "a_cache_leaves_the_device_and_is_there_again_when_caches_are_closed[late]"],
        shows=r"allocated",
    ),
    Mutation(
        says="the last page of keys and values is given up before it has left",
        where="memfit.runtime.caches:_Record._write_rows",
        take="rests.wait(pages.rests[-1])\n    pages.rows = rows",
        put="pages.rows = rows",
        tests=[WAITS + "a_cache_leaves_the_device_and_is_there_again_when_caches_are_closed[late]"],
        shows=r"allocated",
    ),
    Mutation(
        says="caches that are closed are used before they have come",
        where="memfit.runtime.caches:TravellingCaches.close",
        take="record.wait()",
        put="pass",
        tests=[WAITS + "a_cache_leaves_the_device_and_is_there_again_when_caches_are_closed[late]"],
    ),
    Mutation(
        says="a streamed block is used before it has come",
        where="memfit.runtime.streaming:WeightStream.enter",
        take="self._blocks[b].wait()",
        put="pass",
        tests=[TOKENS.format("0")],
        shows=r"AwayError",
        is_slow=True,
    ),
)

MUTATIONS = DEVICES + TRANSFERS + WEIGHTS + GRADIENTS + UPDATES + SAVED + THREADS + LIMITS + HOST + CACHES
