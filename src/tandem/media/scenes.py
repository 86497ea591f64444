"""Renders scenes like CLEVR's by ray casting: spheres, cylinders and cubes on a floor, with shadows and exact counts."""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

COLOURS = {"red": (0.75, 0.12, 0.12), "green": (0.12, 0.55, 0.15), "blue": (0.15, 0.25, 0.85), "yellow": (0.9, 0.8, 0.1)}
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "sphere": ((0, 1, 2),),
    "cylinder": ((0, 1), (2,)),
    "cube": ((0,), (1,), (2,)),
}
"""Shape → groups of axes. A point is inside the shape if, for each group, the squares of the point's coordinates on these
axes sum to at most 1."""

ELEVATION = np.radians(40)
RAY = np.array([0.0, np.cos(ELEVATION), -np.sin(ELEVATION)])
UP, RAISED = np.array([0.0, np.sin(ELEVATION), np.cos(ELEVATION)]), 0.2
"""The direction of a column of pixels, and the height of the point at which the camera looks, above the middle of the floor.
The unit of length is that of `Thing.size`."""

LIGHT = np.array([-0.45, -0.45, 0.77])
VIEW = 2.6
"""Half the width of the camera's view, in the unit of `Thing.size`. Things stand at most `REACH` from the middle in x and in
y."""

REACH, GAP, MIN_VISIBLE, MAX_THINGS = 1.8, 0.1, 0.4, 5
SIDE = 64


@dataclass(frozen=True)
class Thing:
    """An object. ``x``, ``y``: position on the floor; ``size``: half its edge or diameter; ``angle``: in radians."""

    colour: str
    shape: str
    x: float
    y: float
    size: float
    angle: float

    @property
    def radius(self) -> float:
        """The radius of the circle on the floor that contains the object."""
        return self.size * (math.sqrt(2) if self.shape == "cube" else 1)

    def strike(self, origins: np.ndarray, ray: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distances ``[P]`` at which rays from ``origins [P, 3]`` in direction ``ray`` meet the object
        (infinite: never), and the normals ``[P, 3]`` there."""
        cos, sin = np.cos(self.angle), np.sin(self.angle)
        turn = np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])
        offsets = origins - (self.x, self.y, self.size)
        # skip the many rays that miss the sphere around a cube of this size
        near = np.einsum("ij,ij->i", offsets, offsets) - (offsets @ ray) ** 2 / (ray @ ray) < 3 * self.size**2
        start, along = offsets[near] @ turn.T / self.size, turn @ ray / self.size
        enters, leaves = [], []
        for axes in SHAPES[self.shape]:
            o, d = start[:, axes], along[list(axes)] + 1e-9
            a, b, c = (d * d).sum(), o @ d, (o * o).sum(1) - 1
            root = np.sqrt(np.maximum(b * b - a * c, 0))
            missed = b * b < a * c
            enters.append(np.where(missed, np.inf, (-b - root) / a))
            leaves.append(np.where(missed, -np.inf, (-b + root) / a))
        face = np.argmax(enters, axis=0)
        enter = np.max(enters, axis=0)
        enter = np.where((enter < np.min(leaves, axis=0)) & (enter > 1e-6), enter, np.inf)
        inside = np.array([[float(axis in axes) for axis in range(3)] for axes in SHAPES[self.shape]])
        normals = (start + np.where(np.isfinite(enter), enter, 0)[:, None] * along) * inside[face]
        distances, directions = np.full(len(origins), np.inf), np.zeros_like(origins)
        distances[near] = enter
        directions[near] = normals @ turn / np.maximum(np.linalg.norm(normals, axis=1), 1e-9)[:, None]
        return distances, directions


KINDS = list(itertools.product(COLOURS, SHAPES))


def draw_things(draw: random.Random, kinds: Sequence[tuple[str, str]]) -> list[Thing]:
    """Draws a thing of each kind at random places, without contact. The last things are missing if there is no room."""
    things: list[Thing] = []
    for _ in range(20 * len(kinds)):
        colour, shape = kinds[len(things)]
        thing = Thing(
            colour=colour,
            shape=shape,
            x=draw.uniform(-REACH, REACH),
            y=draw.uniform(-REACH, REACH),
            size=draw.uniform(0.5, 0.65),
            angle=draw.uniform(0, np.pi),
        )
        if all(math.hypot(thing.x - other.x, thing.y - other.y) > thing.radius + other.radius + GAP for other in things):
            things.append(thing)
        if len(things) == len(kinds):
            break
    return things


@functools.cache
def _origins(side: int) -> np.ndarray:
    """Returns the origins of the rays of all pixels, ``[side², 3]``, row by row from the upper left."""
    steps = (np.arange(side) + 0.5) / side * 2 * VIEW - VIEW
    right, high = np.meshgrid(steps, -steps)
    return right.reshape(-1, 1) * np.array([1.0, 0.0, 0.0]) + (high.reshape(-1, 1) + RAISED) * UP - 10 * RAY


def visible(things: Sequence[Thing], side: int = 48) -> float:
    """Returns the visible share, 0 to 1, of the thing that is hidden most."""
    distances = np.stack([thing.strike(_origins(side), RAY)[0] for thing in things])
    alone = np.isfinite(distances).sum(1)
    seen = np.bincount(distances.argmin(0)[np.isfinite(distances).any(0)], minlength=len(things))
    return float((seen / np.maximum(alone, 1)).min())


def render(things: Sequence[Thing], side: int = SIDE) -> Image.Image:
    """Renders a picture of ``side`` × ``side`` pixels; each pixel is the mean of four rays."""
    origins = _origins(2 * side)
    distance = -origins[:, 2] / RAY[2]
    normals = np.tile([0.0, 0.0, 1.0], (len(origins), 1))
    floor = origins + distance[:, None] * RAY
    colours = np.tile([0.58, 0.57, 0.55], (len(origins), 1)) * (1.08 - 0.03 * np.linalg.norm(floor[:, :2], axis=1))[:, None]
    gloss = np.zeros(len(origins))
    for thing in things:
        thing_distance, thing_normals = thing.strike(origins, RAY)
        nearer = thing_distance < distance
        distance, normals[nearer] = np.where(nearer, thing_distance, distance), thing_normals[nearer]
        colours[nearer], gloss[nearer] = COLOURS[thing.colour], 0.5
    points = origins + distance[:, None] * RAY + 1e-3 * normals
    lit = ~np.any([np.isfinite(thing.strike(points, LIGHT)[0]) for thing in things], axis=0)
    half = (LIGHT - RAY) / np.linalg.norm(LIGHT - RAY)
    shade = 0.45 + 0.65 * lit * np.maximum(normals @ LIGHT, 0)
    shine = gloss * lit * np.maximum(normals @ half, 0) ** 30
    image = (colours * shade[:, None] + shine[:, None]).reshape(side, 2, side, 2, 3).mean((1, 3))
    return Image.fromarray((255 * image.clip(0, 1)).astype(np.uint8))


def draw_scenes(count: int, seed: int) -> Iterator[list[Thing]]:
    """Yields ``count`` scenes of one to five things; half of the scenes have at most two kinds of things. The random numbers
    differ from those of `clevr_count`."""
    draw = random.Random(f"scenes/{seed}")
    while count:
        kinds = draw.choices(KINDS, k=draw.randint(1, MAX_THINGS))
        if draw.random() < 0.5:
            kinds = draw.choices(kinds[:2], k=len(kinds))
        things = draw_things(draw, kinds)
        if len(things) == len(kinds) and visible(things) >= MIN_VISIBLE:
            count -= 1
            yield things


def things_by_patch(things: Sequence[Thing], patch: int, side: int = SIDE) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays ``[patches]`` of indices into ``things``, one entry for each patch of ``patch`` × ``patch`` pixels,
    row by row; -1 stands for none. First array: the thing that covers most of the patch, if it covers at least a tenth.
    Second array: the thing whose centre is in the patch, hidden or not."""
    across = side // patch
    distances = np.stack([thing.strike(_origins(side), RAY)[0] for thing in things])
    nearest = np.where(np.isfinite(distances).any(0), distances.argmin(0), len(things))
    patches = nearest.reshape(across, patch, across, patch).swapaxes(1, 2).reshape(across**2, -1)
    shares = np.stack([(patches == number).mean(1) for number in range(len(things))])
    seen = np.where(shares.max(0) >= 0.1, shares.argmax(0), -1)
    middles = np.full(across**2, -1)
    for number, thing in enumerate(things):
        height = np.array([thing.x, thing.y, thing.size]) @ UP - RAISED
        row, column = ((VIEW - height) / (2 * VIEW) * across, (thing.x + VIEW) / (2 * VIEW) * across)
        middles[int(row) * across + int(column)] = number
    return seen, middles
