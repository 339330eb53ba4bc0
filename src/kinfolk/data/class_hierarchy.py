"""A hierarchy of classes, and sources whose labels are replaced by those at a depth of it (Chen et
al., Incremental False Negative Detection for Contrastive Learning, ICLR 2022, appendix D).

A class is replaced by its ancestor at a depth, or stays if it is above it; the root has depth 0.
The file is CSV or TSV with the header `child,parent` and a line for each class or inner node below
the root. Names are those of the data's classes, or their numbers if they have no names.
"""

from __future__ import annotations

import copy
import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from kinfolk.data.source import AnySource, Source
from kinfolk.errors import KinfolkError, UsageError, short

CIFAR100 = "the hierarchy of CIFAR-100"
_SUPERCLASSES = """\
aquatic_mammals: beaver dolphin otter seal whale
fish: aquarium_fish flatfish ray shark trout
flowers: orchid poppy rose sunflower tulip
food_containers: bottle bowl can cup plate
fruit_and_vegetables: apple mushroom orange pear sweet_pepper
household_electrical_devices: clock keyboard lamp telephone television
household_furniture: bed chair couch table wardrobe
insects: bee beetle butterfly caterpillar cockroach
large_carnivores: bear leopard lion tiger wolf
large_man-made_outdoor_things: bridge castle house road skyscraper
large_natural_outdoor_scenes: cloud forest mountain plain sea
large_omnivores_and_herbivores: camel cattle chimpanzee elephant kangaroo
medium_mammals: fox porcupine possum raccoon skunk
non-insect_invertebrates: crab lobster snail spider worm
people: baby boy girl man woman
reptiles: crocodile dinosaur lizard snake turtle
small_mammals: hamster mouse rabbit shrew squirrel
trees: maple_tree oak_tree palm_tree pine_tree willow_tree
vehicles_1: bicycle bus motorcycle pickup_truck train
vehicles_2: lawn_mower rocket streetcar tank tractor"""
SUPERCLASSES = {
    name: members.split() for name, members in (x.split(":") for x in _SUPERCLASSES.splitlines())
}


@final
class Hierarchy:
    """A tree of names, from `parents`: child → parent; `name` is used in messages.

    Example:
        >>> parents = {"dog": "mammal", "cat": "mammal", "mammal": "animal", "snail": "animal"}
        >>> Hierarchy(parents, "animals").at(["cat", "dog", "snail"], depth=1)
        ([0, 0, 1], ['mammal', 'snail'])
    """

    def __init__(self, parents: Mapping[str, str], name: str) -> None:
        self.parents, self.name = dict(parents), name
        if not self.parents:
            raise KinfolkError(
                f"{name} has no line below its header; each line must name a child and its parent"
            )
        self._refuse_cycle()
        roots = sorted(set(self.parents.values()) - self.parents.keys())
        if len(roots) > 1:
            some = ", ".join(short(repr(root)) for root in roots[:3])
            more = f" and {len(roots) - 3} more" if len(roots) > 3 else ""
            raise KinfolkError(
                f"{name} has {len(roots)} roots ({some}{more}); add a line for each that names a"
                " common parent"
            )
        self.root = roots[0]

    def path(self, node: str) -> list[str]:
        """The nodes from the root to `node`, both included."""
        if node not in self.parents and node != self.root:
            raise KinfolkError(
                f"the class {node!r} of the data is not in {self.name}; add a line that names its"
                " parent"
            )
        found = [node]
        while found[-1] != self.root:
            found.append(self.parents[found[-1]])
        return found[::-1]

    def at(self, classes: Sequence[str], depth: int) -> tuple[list[int], list[str]]:
        """The new class index of each of `classes`, and the new classes, in alphabetical order."""
        if depth < 0:
            raise UsageError(f"`depth` (={depth}) must be 0, the root, or more")
        names = [self.path(name)[: depth + 1][-1] for name in classes]
        kept = sorted(set(names))
        place = {name: index for index, name in enumerate(kept)}
        return [place[name] for name in names], kept

    def _refuse_cycle(self) -> None:
        settled: set[str] = set()
        for start in self.parents:
            walk: dict[str, None] = {}
            node: str | None = start
            while node is not None and node not in settled:
                if node in walk:
                    steps = [*walk]
                    circle = [*steps[steps.index(node) :], node]
                    raise KinfolkError(
                        f"{self.name} goes in a circle: {' → '.join(map(short, circle[:8]))}; a"
                        " class can't be below itself"
                    )
                walk[node] = None
                node = self.parents.get(node)
            settled.update(walk)


def open_hierarchy(spec: str | os.PathLike[str]) -> Hierarchy:
    """Opens a file or the built-in `cifar100` (20 superclasses at depth 1, 100 classes at depth
    2)."""
    if spec == "cifar100":
        parents = {fine: coarse for coarse, members in SUPERCLASSES.items() for fine in members}
        # some copies of the data shorten them
        parents |= {fine.removesuffix("_tree"): "trees" for fine in SUPERCLASSES["trees"]}
        return Hierarchy({**parents, **dict.fromkeys(SUPERCLASSES, "everything")}, CIFAR100)
    path, parents = Path(spec), {}
    name = f"`{path}`"
    if not path.is_file():
        raise UsageError(
            f"there is no hierarchy file {name}; give a table of child and parent, or cifar100"
        )
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except (csv.Error, OSError, UnicodeDecodeError) as error:
        raise KinfolkError(f"{name} is not a readable table: {error}") from error
    if not rows or [cell.strip().lower() for cell in rows[0]] != ["child", "parent"]:
        raise KinfolkError(
            f"{name} must begin with a line that names its two columns, `child` and `parent`"
        )
    for number, row in enumerate(rows[1:], 2):
        child, *rest = cells = [cell.strip() for cell in row] or [""]
        if not any(cells):
            continue
        line = f"line {number} of {name}"
        if not child or len(rest) != 1:
            raise KinfolkError(f"{line} must hold a child and its parent; it holds {row}")
        if not rest[0]:
            raise KinfolkError(
                f"{line} gives {child!r} no parent; name one, or leave the line out if it is the"
                " root"
            )
        if parents.setdefault(child, rest[0]) != rest[0]:
            raise KinfolkError(
                f"{line} gives {child!r} a second parent, {rest[0]!r}; it has {parents[child]!r};"
                " keep one"
            )
    return Hierarchy(parents, name)


def at_depth(source: AnySource, hierarchy: str | None, depth: int | None) -> AnySource:
    """The source with labels at `depth` of `hierarchy`; unchanged if neither is given."""
    if hierarchy is None and depth is None:
        return source
    if hierarchy is None or depth is None:
        raise UsageError("`hierarchy` and `depth` must be given together")
    tree, found = open_hierarchy(hierarchy), copy.copy(source)
    found.class_of_label, found.classes = tree.at(_classes(source, tree), depth)
    return found


def _classes(source: Source, hierarchy: Hierarchy) -> list[str]:
    """The names of the source's classes or, without names, the numbers of its labels; those of
    CIFAR-100 are the places of its class names in alphabetical order."""
    if source.classes is not None:
        return source.classes
    labels = [item.label for item in source.items() if item.label is not None]
    if not labels:
        raise UsageError(
            f"{source.name} has no labels that a hierarchy could replace; give labelled data"
        )
    names = [str(number) for number in range(max(labels) + 1)]
    if hierarchy.name == CIFAR100:
        fine = sorted(name for members in SUPERCLASSES.values() for name in members)
        if len(names) > len(fine):
            raise KinfolkError(
                f"{source.name} has the label {names[-1]}, and CIFAR-100 has 100 classes; use"
                " another hierarchy"
            )
        names = fine[: len(names)]
    return names
