"""The pictures of docs/concepts.md, drawn by `python docs/site/concept_pictures.py`: boxes, arrows and lanes as SVG."""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
BLUE, ORANGE, GREEN, YELLOW, GREY, RED = "#a6cee3", "#fdbf6f", "#b2df8a", "#fff2a8", "#e4e4e4", "#f4a6a0"


class Picture:
    """An SVG of a fixed size on white, so that it reads on a dark page too."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, list[str]()

    def box(self, x: int, y: int, width: int, height: int, text: str, colour: str = GREY) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{colour}" stroke="#555"/>'
        )
        lines = text.split("\n")
        for i, line in enumerate(lines):
            self.text(x + width // 2, y + height // 2 + 4 + round((i - (len(lines) - 1) / 2) * 15), line, "middle")

    def text(self, x: int, y: int, text: str, anchor: str = "start", colour: str = "#222") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>')

    def arrow(self, *points: tuple[int, int]) -> None:
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="#555" marker-end="url(#head)"/>')

    def svg(self) -> str:
        width, height = self.size
        marker = '<marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
                f'font-family="sans-serif" font-size="12"><title>{escape(self.title)}</title>',
                f'<defs>{marker}<path d="M0,0 L9,4 L0,8 z" fill="#555"/></marker></defs>',
                f'<rect width="{width}" height="{height}" fill="#fff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def one_graph() -> Picture:
    picture = Picture(760, 262, "inputs of a step, its nodes from forward to update, and the epilogue")
    inputs = ("parameters, buffers", "optimizer state", "lr, betas, loss scale", "random state", "your batch")
    for i, name in enumerate(inputs):
        picture.box(10, 14 + i * 42, 170, 32, name, BLUE)
    names = ("forward\nand loss", "backward", "gradient\ncollectives", "clipping", "optimizer")
    for i, name in enumerate(names):
        picture.box(230 + i * 76, 84, 68, 46, name, ORANGE if "coll" in name else GREEN)
        if i:
            picture.arrow((298 + (i - 1) * 76, 107), (306 + (i - 1) * 76, 107))
    picture.box(218, 60, 396, 86, "", "none")
    picture.text(416, 76, "one FX graph, without mutation", "middle")
    picture.arrow((180, 107), (218, 107))
    picture.box(636, 60, 114, 86, "epilogue:\ncopy_ into your\nparameters and\noptimizer state", YELLOW)
    picture.arrow((614, 103), (636, 103))
    picture.box(452, 176, 162, 32, "loss: what you returned", BLUE)
    picture.arrow((533, 146), (533, 176))
    picture.arrow((693, 146), (693, 232), (95, 232), (95, 214))
    picture.text(440, 250, "the next call reads what this one wrote", "middle")
    return picture


def guards() -> Picture:
    picture = Picture(780, 202, "a call runs the first graph whose guards hold, or is captured")
    picture.box(10, 70, 120, 44, "train_step(batch)", BLUE)
    picture.box(180, 62, 140, 60, "do the guards of a\ncaptured graph hold?", YELLOW)
    picture.arrow((130, 92), (180, 92))
    picture.box(400, 20, 170, 44, "replay: read inputs, run,\nwrite back", GREEN)
    picture.box(400, 118, 170, 56, "capture the call on\nfake tensors: nothing\nruns or changes", ORANGE)
    picture.arrow((320, 80), (360, 80), (360, 42), (400, 42))
    picture.text(366, 60, "yes")
    picture.arrow((320, 104), (360, 104), (360, 146), (400, 146))
    picture.text(366, 134, "no")
    picture.box(620, 118, 130, 56, "a new graph with its\nguards, compiled", GREEN)
    picture.arrow((570, 146), (620, 146))
    picture.arrow((685, 118), (685, 42), (570, 42))
    picture.text(330, 194, "cannot be captured: an error with a code, your line, and what to do", "start", "#933")
    return picture


def lowering() -> Picture:
    picture = Picture(760, 150, "runs of operators become compiled regions; collectives stay nodes between them")
    nodes = ("embed", "norm", "mm", "gelu", "gather", "wait", "mm", "loss", "mm", "mm", "scatter", "wait", "adamw")
    for i, name in enumerate(nodes):
        communication = name in ("gather", "wait", "scatter")
        picture.box(10 + i * 57, 10, 50, 30, name, ORANGE if communication else GREEN)
    for first, last, name in ((0, 3, "region 0"), (6, 9, "region 1"), (12, 12, "reg. 2")):
        left, right = 10 + first * 57, 60 + last * 57
        picture.box(left, 84, right - left, 32, name, BLUE)
        picture.arrow(((left + right) // 2, 42), ((left + right) // 2, 84))
    for at, name in ((4, "gather"), (5, "wait"), (10, "scatter"), (11, "wait")):
        picture.box(10 + at * 57, 84, 50, 32, name, ORANGE)
    picture.text(
        10,
        138,
        "a region is one call into code that Inductor wrote; a collective keeps its place, so that it can be moved",
    )
    return picture


def exposed() -> Picture:
    picture = Picture(760, 176, "communication behind computation is free; what computation waits for is exposed")
    for y, name in ((34, "computation"), (78, "process group")):
        picture.text(10, y + 20, name)
    for x, width, text in ((110, 150, "backward of layer 3"), (262, 150, "backward of layer 2"), (414, 110, "layer 1")):
        picture.box(x, 34, width, 32, text, GREEN)
    picture.box(640, 34, 100, 32, "optimizer", GREEN)
    for x, width, text in ((262, 120, "reduce 3"), (414, 108, "reduce 2"), (526, 112, "reduce 1")):
        picture.box(x, 78, width, 32, text, ORANGE)
    picture.box(526, 34, 112, 32, "stands still", RED)
    picture.text(526, 134, "exposed time: nothing is left to", "start", "#933")
    picture.text(526, 150, "compute while this is on its way", "start", "#933")
    picture.text(262, 134, "hidden: costs nothing")
    picture.arrow((110, 166), (750, 166))
    picture.text(110, 160, "time")
    return picture


def memory() -> Picture:
    picture = Picture(760, 214, "memory over a step: saved activations grow in the forward and shrink in the backward")
    picture.parts.append(f'<rect x="60" y="130" width="680" height="50" fill="{BLUE}"/>')
    picture.parts.append(f'<polygon points="60,130 390,30 640,130" fill="{ORANGE}"/>')
    picture.parts.append(f'<polygon points="390,30 640,130 740,130 740,108 640,108" fill="{GREEN}"/>')
    picture.parts.append(
        '<polyline points="60,130 300,78 400,70 640,130" fill="none" stroke="#933" stroke-dasharray="5 4"/>'
    )
    picture.text(70, 160, "parameters and optimizer state")
    picture.text(225, 122, "saved for the backward")
    picture.text(655, 122, "gradients")
    picture.text(400, 26, "peak", "start", "#933")
    picture.text(62, 50, "with a budget: some values are", "start", "#933")
    picture.text(62, 65, "recomputed instead of saved", "start", "#933")
    for x, name in ((180, "forward"), (500, "backward"), (690, "update")):
        picture.text(x, 202, name, "middle")
    picture.arrow((60, 186), (748, 186))
    return picture


ALL = {
    "concept-one-graph": one_graph,
    "concept-guards": guards,
    "concept-lowering": lowering,
    "concept-exposed": exposed,
    "concept-memory": memory,
}

if __name__ == "__main__":
    for name, draw in ALL.items():
        (PICTURES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
