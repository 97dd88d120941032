"""Plan search: the fastest plan that fits a budget.

In: `Profile`, `Budget`, `Hardware`. Out: `PlanChoice` (`planner.choose_plan`). `candidates` lists
uniform plans, `pricing` bounds each and predicts those that could win; `mixing` and `widening`
search plans that decide block by block. Nothing here imports torch.
"""
