"""What each parameter token does: score maps, an index of all tokens, interventions, growth.

    from tokenformer import interpret

    maps = interpret.score_maps(model, ids)
    index = interpret.index_tokens(model, batches)
    with interpret.intervene(model, off=["3.ffn.17"]):
        ...

Tokens are named by block, projection and number: 3.ffn.17.
"""

from tokenformer.interpret.attribution import ablate_each, attribute
from tokenformer.interpret.behavior import Behavior
from tokenformer.interpret.clear_tokens import ClearToken, clearest_tokens
from tokenformer.interpret.controlling_set import ControllingSet, controlling_set
from tokenformer.interpret.growth_view import GrowthView, growth_view, plot_growth
from tokenformer.interpret.index_tokens import index_tokens
from tokenformer.interpret.intervention import Effect, continue_text, edit, effect, intervene
from tokenformer.interpret.score_map import ScoreMap, ScoreMaps, direct_effects, score_maps
from tokenformer.interpret.score_plot import plot_patches, plot_scores, write_scores
from tokenformer.interpret.task_measure import on_tasks
from tokenformer.interpret.token_index import Context, LayerIndex, TokenIndex
from tokenformer.interpret.token_name import Token
from tokenformer.interpret.vocabulary import Vocabulary

__all__ = [
    "Behavior",
    "ClearToken",
    "Context",
    "ControllingSet",
    "Effect",
    "GrowthView",
    "LayerIndex",
    "ScoreMap",
    "ScoreMaps",
    "Token",
    "TokenIndex",
    "Vocabulary",
    "ablate_each",
    "attribute",
    "clearest_tokens",
    "continue_text",
    "controlling_set",
    "direct_effects",
    "edit",
    "effect",
    "growth_view",
    "index_tokens",
    "intervene",
    "on_tasks",
    "plot_growth",
    "plot_patches",
    "plot_scores",
    "score_maps",
    "write_scores",
]
