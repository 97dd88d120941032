"""A model together with frozen ones that its loss calls: a teacher, a reference.

In: modules. Out: one module for `memfit.fit`, so that all of them are inside one limit.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from memfit.core.errors import UsageError


class WithFrozen(nn.Module):
    """A model whose loss calls other models that do not train: `memfit.WithFrozen(student,
    teacher=teacher)`.

    `memfit.fit` takes it in place of the model: then the others rest where the plan says, and count
    under the limit. Parts of the model keep their names, and a save is one of the model alone.
    Calling it calls the model; the others are attributes.

    Args:
        model: that trains; attribute `trained`.
        frozen: by name, models without trained parameters, in the mode that they are to be in.

    Raises:
        UsageError: a name that the model has, or a model that trains.
    """

    def __init__(self, model: nn.Module, **frozen: nn.Module) -> None:
        super().__init__()
        # Past `Module`'s own: as a child it would give all its parts a second name.
        object.__setattr__(self, "saved_as", model)
        for name, child in model.named_children():
            self.add_module(name, child)
        # The model's own tables: whoever puts another tensor in a place of one (a trace, a visit)
        # puts it where the model's forward looks, too.
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[table] = vars(model)[table]
        for name, other in frozen.items():
            if hasattr(self, name):
                raise UsageError(f"the model has a {name!r} itself: give the frozen one another name")
            trained = next((n for n, p in other.named_parameters() if p.requires_grad), None)
            if trained is not None:
                raise UsageError(
                    f"{name}.{trained} would train: call {name}.requires_grad_(False) before memfit.WithFrozen"
                )
            self.add_module(name, other)

    @property
    def trained(self) -> Any:
        """The model."""
        return saved_model(self)

    def train(self, mode: bool = True) -> WithFrozen:  # noqa: FBT001, FBT002, torch's signature
        """Sets the mode of the model; frozen ones stay in theirs."""
        self.training = mode
        self.trained.train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.trained(*args, **kwargs)


def saved_model(model: nn.Module) -> nn.Module:
    """Returns the module whose names and configuration a save has."""
    return vars(model).get("saved_as", model)
