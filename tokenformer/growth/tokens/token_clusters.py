"""Balanced clusters of tokens that fire together, by k-means with clusters of equal size.

A token is described by how much it adds to the output on a sample of input rows. Tokens whose
profiles point in the same direction are useful for the same inputs, so a router can choose or skip
them together (MoEfication, arXiv 2110.01786).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ITERATIONS = 10


def balanced_clusters(profiles: Tensor, cluster_size: int, *, seed: int = 0) -> Tensor:
    """Return an order [n] of the tokens in which every `cluster_size` consecutive ones are a
    cluster; the last one may be smaller. `profiles` [n, features] describe the tokens."""
    count = profiles.shape[0]
    clusters = -(-count // cluster_size)
    capacity = torch.full((clusters,), cluster_size, device=profiles.device)
    capacity[-1] = count - (clusters - 1) * cluster_size
    points = F.normalize(profiles.float(), dim=1)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randperm(count, generator=generator)[:clusters].to(points.device)
    centers = points[first]
    for _ in range(ITERATIONS):
        assigned = assign(points @ centers.T, capacity)
        sums = torch.zeros_like(centers).index_add_(0, assigned, points)
        centers = F.normalize(sums, dim=1)
    return assigned.argsort(stable=True)


def assign(similarity: Tensor, capacity: Tensor) -> Tensor:
    """Assign every token to one of the clusters, which take at most `capacity` [clusters] tokens.

    In each round, the tokens that are left ask for the most similar cluster with room, and every
    cluster takes the most similar of those that ask. At least one cluster fills up or all tokens
    are placed, so there are at most as many rounds as clusters.
    """
    similarity = similarity.clone()
    room = capacity.clone()
    assigned = torch.full((len(similarity),), -1, device=similarity.device)
    waiting = torch.arange(len(similarity), device=similarity.device)
    while len(waiting):
        best, wanted = similarity[waiting].masked_fill(room == 0, -torch.inf).max(1)
        # By cluster, the most similar first: a token's rank among those that ask.
        order = best.argsort(descending=True, stable=True)
        order = order[wanted[order].argsort(stable=True)]
        asked = wanted[order]
        starts = torch.searchsorted(asked, torch.arange(len(room), device=asked.device))
        rank = torch.arange(len(order), device=asked.device) - starts[asked]
        taken = order[rank < room[asked]]
        assigned[waiting[taken]] = wanted[taken]
        room -= torch.bincount(wanted[taken], minlength=len(room))
        left = torch.ones(len(waiting), dtype=torch.bool, device=asked.device)
        left[taken] = False
        waiting = waiting[left]
    return assigned
