"""From decisions to the step as data, and the proof that it is legal.

In: `Plan` and `Profile`. Out: first a `Schedule` (`build.build_step`, `build.build_forward`), made
by small passes over the order of computing (`orders`): visits of weights and their prefetch
(`visit_actions`), what leaves the device between forward and backward (`activation_actions`),
gradients and updates (`gradient_actions`). `lower.lower` then gives each action its meaning, as a
`core.step.Step` that prediction adds up and the engine executes. `check.check_step` proves any
lowered step legal, built here or edited by a person.
"""
