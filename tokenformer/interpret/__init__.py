"""What each parameter token does: score maps, an index of all tokens, interventions, growth.

    from tokenformer import interpret

    maps = interpret.score_maps(model, ids)
    index = interpret.index_tokens(model, batches)

Tokens are named by block, projection and number: 3.ffn.17.
"""

from tokenformer.interpret.index_tokens import index_tokens
from tokenformer.interpret.score_map import ScoreMap, ScoreMaps, direct_effects, score_maps
from tokenformer.interpret.score_plot import plot_patches, plot_scores, write_scores
from tokenformer.interpret.token_index import Context, LayerIndex, TokenIndex
from tokenformer.interpret.token_name import Token
from tokenformer.interpret.vocabulary import Vocabulary

__all__ = [
    "Context",
    "LayerIndex",
    "ScoreMap",
    "ScoreMaps",
    "Token",
    "TokenIndex",
    "Vocabulary",
    "direct_effects",
    "index_tokens",
    "plot_patches",
    "plot_scores",
    "score_maps",
    "write_scores",
]
