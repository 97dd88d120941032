"""Built-in training runs: an ordinary model, optimizer, schedule, loss and real text, all
unmodified torch objects.

In: a recipe's name. Out: a `Recipe` (`memfit.integrations.recipes`). Needs the extra
`memfit[transformers]`.
"""

from memfit.integrations.recipes.gpt import RECIPES, Recipe, find_recipe
from memfit.integrations.recipes.model_recipe import model_recipe
from memfit.integrations.recipes.token_batches import CorpusError, TokenWindows, read_tokens

__all__ = ["RECIPES", "CorpusError", "Recipe", "TokenWindows", "find_recipe", "model_recipe", "read_tokens"]
