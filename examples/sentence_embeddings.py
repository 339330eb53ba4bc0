"""Sentence embeddings: two views of a sentence are two random halves of its words; sentences on one
topic are each other's kin.

The encoder is a bag of words, so that this runs offline; any model that gives one vector a sentence
takes its place.

Run: python examples/sentence_embeddings.py
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

import kinfolk as kf

TOPICS = {
    "cooking": "simmer onion garlic butter oven flour knead dough salt pepper roast soup",
    "sailing": "harbour mast anchor wind tide sail keel rope deck storm crew compass",
    "music": "violin chord melody rhythm choir tempo piano drum tune concert verse note",
    "gardens": "soil seed prune rose hedge compost bloom lawn spade root bulb shade",
}
FILLERS = [
    "the",
    "a",
    "of",
    "in",
    "with",
    "and",
    "then",
    "we",
    "they",
    "slowly",
    "near",
    "old",
    "new",
    "good",
    "very",
    "some",
]


def sentences(count: int) -> tuple[list[list[str]], Tensor]:
    """Sentences of eight topic words and four fillers, and the topic of each."""
    topics = [random.randrange(len(TOPICS)) for _ in range(count)]
    words = [text.split() for text in TOPICS.values()]
    return [
        random.sample(words[topic], 8) + random.sample(FILLERS, 4) for topic in topics
    ], torch.tensor(topics)


def main() -> None:
    random.seed(0)
    torch.manual_seed(0)
    texts, topics = sentences(800)
    index = {word: i for i, word in enumerate(sorted({word for text in texts for word in text}))}
    tokens = torch.tensor([[index[word] for word in text] for text in texts])
    encoder = nn.Sequential(nn.EmbeddingBag(len(index), 64), nn.Linear(64, 32))
    loss_fn = kf.NTXentLoss(temperature=0.2, detector=kf.FNC(alpha=0.1), action="attract")
    loss_fn.set_eval_labels(topics)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)
    for epoch in range(10):
        loss_fn.set_progress(epoch, 10)
        for ids in torch.split(torch.randperm(len(tokens)), 100):
            halves = tokens[ids][:, torch.randperm(tokens.shape[1])].chunk(2, dim=1)
            loss = loss_fn(encoder(halves[0]), encoder(halves[1]), ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(
            f"epoch {epoch}  loss {loss.item():.3f}  precision {loss_fn.stats.precision:.2f} "
            f" recall {loss_fn.stats.recall:.2f}"
        )


if __name__ == "__main__":
    main()
