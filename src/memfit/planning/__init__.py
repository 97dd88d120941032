"""From a profile, limits and a machine to decisions, each with its price.

In: `Profile`, `Budget`, `Hardware`. Out: `PlanChoice` (`planner.choose_plan`, called by
`api.choosing` for each dtype and format of states that is allowed). `candidates` lists plans,
`pricing` bounds each and builds and predicts those that could win; the prediction of the built
schedule decides. Nothing here imports torch.
"""
