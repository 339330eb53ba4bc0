"""Hierarchies: labels at a depth, and what is wrong with a file in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kinfolk.data.arrays import ArraySource
from kinfolk.data.labels import SUPERCLASSES, LabelHierarchy, open_hierarchy
from kinfolk.data.open_source import open_source
from kinfolk.data.prepare import prepare
from kinfolk.data.source import at_depth
from kinfolk.errors import KinfolkError, UsageError

ANIMALS = "child,parent\ndog,mammal\ncat,mammal\nmammal,chordate\ngoldfish,chordate\nchordate,animal\nsnail,animal\n"  # noqa: E501


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("depth", "classes", "labels"),
    [
        (0, ["animal"], [0, 0, 0, 0]),
        (1, ["chordate", "snail"], [0, 0, 0, 1]),
        (2, ["goldfish", "mammal", "snail"], [1, 1, 0, 2]),
        (3, ["cat", "dog", "goldfish", "snail"], [0, 1, 2, 3]),
        (9, ["cat", "dog", "goldfish", "snail"], [0, 1, 2, 3]),
    ],
)
def test_labels_at_every_depth(
    depth: int, classes: list[str], labels: list[int], tmp_path: Path
) -> None:
    for name, text in (("tree.csv", ANIMALS), ("tree.tsv", ANIMALS.replace(",", "\t"))):
        tree = open_hierarchy(write(tmp_path / name, text))
        assert tree.at(["cat", "dog", "goldfish", "snail"], depth) == (labels, classes)


def test_the_data_is_relabelled(tmp_path: Path) -> None:
    images = np.zeros((6, 8, 8, 3), dtype=np.uint8)
    source = ArraySource(
        {"train": (images, [0, 1, 2, 3, -1, 0])},
        name="x",
        classes=["cat", "dog", "goldfish", "snail"],
    )
    data = prepare(at_depth(source, write(tmp_path / "tree.csv", ANIMALS), 1), image_size=8)
    assert data.labels is not None
    assert data.labels.tolist() == [0, 0, 0, 1, -1, 0]
    assert data.classes == ["chordate", "snail"]
    assert at_depth(source, None, None) is source
    for pair in (("cifar100", None), (None, 1)):
        with pytest.raises(UsageError, match="`hierarchy` and `depth` must be given together"):
            at_depth(source, *pair)


def test_numbers_stand_for_classes_without_names(tmp_path: Path) -> None:
    images = np.zeros((3, 8, 8, 3), dtype=np.uint8)
    source = open_source(images, labels=[0, 1, 2])
    tree = write(
        tmp_path / "tree.csv", "child,parent\n0,even\n1,odd\n2,even\neven,number\nodd,number\n"
    )
    relabelled = at_depth(source, tree, 1)
    assert [relabelled.label(index) for index in range(3)] == [0, 1, 0]
    with pytest.raises(UsageError, match="no labels that a hierarchy could replace"):
        at_depth(open_source(images), tree, 1)


def test_cifar100_is_built_in() -> None:
    tree = open_hierarchy("cifar100")
    fine = sorted(name for members in SUPERCLASSES.values() for name in members)
    assert len(fine) == len(set(fine)) == 100
    labels, coarse = tree.at(fine, 1)
    assert len(coarse) == 20
    assert np.bincount(labels).tolist() == [5] * 20
    assert coarse[labels[fine.index("whale")]] == "aquatic_mammals"
    assert tree.at(fine, 2) == (list(range(100)), fine)
    images = np.zeros((3, 8, 8, 3), dtype=np.uint8)
    # beaver, dolphin, apple
    numbered = at_depth(open_source(images, labels=[4, 30, 0]), "cifar100", 1)
    assert numbered.classes is not None
    assert [numbered.classes[numbered.label(i) or 0] for i in range(3)] == [
        "aquatic_mammals",
        "aquatic_mammals",
        "fruit_and_vegetables",
    ]
    with pytest.raises(KinfolkError, match="has the label 100"):
        at_depth(open_source(images, labels=[0, 1, 100]), "cifar100", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dog,mammal\n", "must have the columns `child` and `parent`"),
        ("", "is empty; its first line must name the columns"),
        ("child,parent\n", "the class 'a' of the data is not in"),
        ("child,parent\na,b\nb,c\nc,a\n", "has a cycle: a → b → c → a"),
        ("child,parent\na,a\n", "has a cycle: a → a"),
        ("child,parent\na,x\nb,y\n", r"has 2 roots \('x', 'y'\)"),
        ("child,parent\na,\n", "row 1 of .* must hold a child and its parent"),
        ("child,parent\n\na,b,c\n", "row 1 of .* has 3 cells, its header has 2"),
        ("child,parent\na,b\na,c\n", "row 2 of .* gives 'a' a second parent, 'c'; it has 'b'"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(KinfolkError, match=message):
        open_hierarchy(write(tmp_path / "tree.csv", text)).at(["a", "b"], 1)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    tree = LabelHierarchy({"dog": "animal"}, "the tree")
    with pytest.raises(KinfolkError, match="the class 'cat' of the data is not in the tree"):
        tree.at(["dog", "cat"], 1)
    with pytest.raises(UsageError, match=r"`depth` \(=-1\) must be 0"):
        tree.at(["dog"], -1)
    with pytest.raises(UsageError, match="there is no hierarchy file"):
        open_hierarchy(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KinfolkError, match="must have the columns"):
        open_hierarchy(tmp_path / "binary.csv")


def test_deep_trees_are_walked_once() -> None:
    """A chain of 20,000: neither recursion nor a quadratic search for circles."""
    chain = LabelHierarchy({f"n{i}": f"n{i + 1}" for i in range(20_000)}, "the chain")
    assert chain.at(["n0", "n5"], 19_990)[1] == ["n10"]
