"""The clearest tokens of an index: those that are easiest to name.

    for each in clearest_tokens(index, vocabulary, 10):
        print(each.token, each.pattern, each.score)

A token is clear if it is selective and if its strongest contexts agree: the score is the product
of its selectivity and the share of its contexts that fire at the same text. Of tokens that fire at
the same text only the best one counts. Only tokens of layers that write to the residual stream are
considered, because the others add nothing that has a name.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from tokenformer.interpret.token_index import Context, TokenIndex
from tokenformer.interpret.token_name import Token
from tokenformer.interpret.vocabulary import Vocabulary

MOST_OF_A_LAYER = 4
SHARED = 0.75
"""Share of the contexts that a pattern must be in."""


@dataclass(frozen=True)
class ClearToken:
    token: Token
    selectivity: float
    agreement: float
    """Share of its contexts that fire at the most common text; 1 for images, which have none."""
    contexts: list[Context]

    @property
    def score(self) -> float:
        return self.selectivity * self.agreement

    @cached_property
    def fired(self) -> str:
        """The text that most of its contexts fire at."""
        return Counter(context.fired for context in self.contexts).most_common(1)[0][0]

    @cached_property
    def pattern(self) -> str:
        """The longest text, up to where it fires, that three quarters of its contexts share."""
        texts = [context.before + context.fired for context in self.contexts]
        found = ""
        for length in range(1, max(map(len, texts), default=0) + 1):
            endings = Counter(text[-length:] for text in texts if len(text) >= length)
            ending, count = endings.most_common(1)[0]
            if count < SHARED * len(texts):
                break
            found = ending
        return found


def clearest_tokens(
    index: TokenIndex, vocabulary: Vocabulary | None = None, count: int = 10
) -> list[ClearToken]:
    """Return the clearest tokens, best first, at most four of a layer."""
    chosen: list[ClearToken] = []
    texts: set[str] = set()
    layers: Counter[str] = Counter()
    for each in by_score(index, vocabulary):
        if layers[each.token.layer] == MOST_OF_A_LAYER or (each.fired and each.fired in texts):
            continue
        layers[each.token.layer] += 1
        texts.add(each.fired)
        chosen.append(each)
        if len(chosen) == count:
            break
    return chosen


def by_score(index: TokenIndex, vocabulary: Vocabulary | None) -> Iterator[ClearToken]:
    """Yield the tokens that fire, in at least two samples, and whose value has a name. A score is
    at most the selectivity, so few contexts are read before the first ones are known."""
    heap: list[tuple[float, Token, ClearToken]] = []
    for token in by_selectivity(index):
        selectivity = index.layers[token.layer].selectivity[token.number].item()
        while heap and -heap[0][0] >= selectivity:
            yield heappop(heap)[2]
        contexts = index.contexts(token, vocabulary)
        if sum(each.weight >= index.summary.threshold for each in contexts) > 1:
            counts = Counter(context.fired for context in contexts)
            agreement = counts.most_common(1)[0][1] / len(contexts)
            found = ClearToken(token, selectivity, agreement, contexts)
            heappush(heap, (-found.score, token, found))
    while heap:
        yield heappop(heap)[2]


def by_selectivity(index: TokenIndex) -> list[Token]:
    found = []
    for name, layer in index.layers.items():
        if layer.promoted.shape[1]:
            fires = (layer.largest >= index.summary.threshold).nonzero().flatten()
            found += [
                (-selectivity, name, number)
                for selectivity, number in zip(
                    layer.selectivity[fires].tolist(), fires.tolist(), strict=True
                )
            ]
    return [Token(name, number) for _, name, number in sorted(found)]
