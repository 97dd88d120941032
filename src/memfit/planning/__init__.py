"""From a profile, limits and a machine to decisions, each with its price.

In: `Profile`, `Budget`, `Hardware`. Out: `PlanChoice` (`rules.choose_plan`). Candidates are listed
in `candidates`; the schedule that is built and predicted is the judge. Nothing here imports torch.
"""
