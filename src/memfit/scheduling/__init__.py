"""From decisions to the step as data, and the proof that it is legal.

In: `Plan` and `Profile`. Out: `Schedule` (`build.build_step`, `build.build_forward`), made by small passes over the
order of computing (`orders`): visits of weights and their prefetch (`visits`), what leaves the device between forward
and backward (`activations`), gradients and updates (`gradients`). `check.check_schedule` proves any schedule legal,
ours or a person's.
"""
