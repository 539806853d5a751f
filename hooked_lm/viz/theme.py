"""The colours of figures and pages, on light and on dark paper.

Figures have no paper, and neutral text that is legible on white and on black, because a notebook draws them on its own paper,
light or dark. On a page a script replaces each colour by its light or dark counterpart, as the reader prefers. Blue and
orange-brown are told apart by people who are colour-blind.
"""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Noto Sans', Arial, sans-serif"
SERIF = "Charter, 'Bitstream Charter', 'Sitka Text', Cambria, 'Noto Serif', Georgia, serif"
MONO = "ui-monospace, 'SF Mono', 'Cascadia Code', 'Source Code Pro', Menlo, Consolas, monospace"

# name -> the colour on light and on dark paper
COLOURS = {
    "paper": ("#ffffff", "#14181f"),
    "ink": ("#1c2330", "#e4e8ef"),
    "soft": ("#475067", "#b6bfce"),  # the text below a title
    "faint": ("#667085", "#98a2b5"),  # captions, ticks, labels of axes
    "line": ("#e9ecf1", "#2b323e"),  # rules, grids, the background of heat maps
    "strong": ("#c9cfda", "#485263"),  # the line below the head of a table
    "panel": ("#f3f5f8", "#202733"),  # the background of code and tokens
    "marked": ("#fde6b8", "#5c4512"),
    "marker": ("#e0a021", "#e0a021"),
    "up": ("#386fa8", "#6aa5e0"),  # positive
    "down": ("#c8694c", "#e58a6b"),  # negative
    "most": ("#173f73", "#b4d8ff"),  # the largest of a text, and the lowest
    "least": ("#8f2d1c", "#ffb59a"),
    "third": ("#3d8f6d", "#6cc49c"),  # of the lines
    "focus": ("#1f5fbf", "#8ab8ff"),
}
# the colours of figures on paper that may be white or black
ANYWHERE = {"paper": "rgba(0, 0, 0, 0)", "ink": "#717a8a", "faint": "#737c8b", "line": "rgba(128, 136, 150, 0.25)"}
ALPHAS = (0.0, 0.85)  # of values over an image: small ones, large ones
PAPER, INK, FAINT, GRID = (ANYWHERE[name] for name in ("paper", "ink", "faint", "line"))
WHITE, BOX, BOX_INK = (COLOURS[name][0] for name in ("paper", "line", "ink"))  # of what has its own ground
UP, DOWN, THIRD = (COLOURS[name][0] for name in ("up", "down", "third"))
MISSING = "#d5d9e0"  # cells without a value
PALEST, DIMMEST, CONTRAST = (
    255,
    122,
    0.4,
)  # the white of pale images below values, on light and on dark paper; their contrast

DIVERGING = [
    (0.0, "#8f2d1c"), (0.2, "#c8694c"), (0.38, "#efc4b0"), (0.5, "#ffffff"),
    (0.62, "#b9d2e8"), (0.8, "#5b8fc2"), (1.0, "#173f73"),
]  # fmt: skip
SEQUENTIAL = [(0.0, "#ffffff"), (0.15, "#dbe8f3"), (0.45, "#8db5d8"), (0.75, "#386fa8"), (1.0, "#12325e")]
FALLING = [(0.0, "#6b2113"), (0.25, "#b4573b"), (0.55, "#dc9c80"), (0.85, "#f5ddd0"), (1.0, "#ffffff")]
DARK_DIVERGING = ["#ffb59a", "#d9764f", "#7a3e2b", "#14181f", "#2a4d70", "#5593cf", "#b4d8ff"]
DARK_SEQUENTIAL = ["#14181f", "#1d3148", "#2f5f8f", "#6aa5e0", "#cfe6ff"]
DARK_FALLING = ["#ffd9c7", "#e58a6b", "#8f4a33", "#3d241c", "#14181f"]


def light_colours() -> dict[str, str]:
    """The light counterpart of each colour that is legible anywhere."""
    return {colour: COLOURS[name][0] for name, colour in ANYWHERE.items()}


def dark_colours() -> dict[str, str]:
    """The dark counterpart of each colour: of those that are legible anywhere, the light ones, and those of plotly's template.

    A colour scale has counterparts of its own, because its middle is the colour of the paper: its stops are listed with their
    places, as "0.5 #ffffff". "pale" is what is added to the pixels of pale images.

    >>> dark_colours()["#1c2330"], dark_colours()["0.2 #c8694c"]
    ('#e4e8ef', '#d9764f')
    """
    scales = [(DIVERGING, DARK_DIVERGING), (SEQUENTIAL, DARK_SEQUENTIAL), (FALLING, DARK_FALLING)]
    stops = {
        f"{place:g} {light}": dark for scale, darks in scales for (place, light), dark in zip(scale, darks, strict=True)
    }
    ours = dict(COLOURS.values()) | {colour: COLOURS[name][1] for name, colour in ANYWHERE.items()}
    template = {"white": "paper", "#2a3f5f": "ink", "#e5ecf6": "line", "#ebf0f8": "line", "#c8d4e3": "strong"}
    overlays = {
        translucent(light, alpha): translucent(dark, alpha) for light, dark in COLOURS.values() for alpha in ALPHAS
    }
    dim = {MISSING: "#3a4250", "pale": str(DIMMEST - PALEST)}
    return stops | {light: COLOURS[name][1] for light, name in template.items()} | ours | overlays | dim


def translucent(colour: str, alpha: float) -> str:
    """A colour that lets what is below it show through.

    >>> translucent("#ffffff", 0.5)
    'rgba(255, 255, 255, 0.5)'
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, {alpha:g})"


def css() -> str:
    """The colours and fonts as variables of CSS: `var(--ink)`, `var(--sans)`."""
    light, dark = ("; ".join(f"--{name}: {pair[i]}" for name, pair in COLOURS.items()) for i in (0, 1))
    return (
        f":root {{ color-scheme: light dark; {light}; --sans: {FONT}; --serif: {SERIF}; --mono: {MONO}; }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
    )
