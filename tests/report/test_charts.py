"""Charts are well-formed SVG and put their lines where the numbers say."""

import xml.etree.ElementTree as ET

import numpy as np

from pistar.report.charts import curve_chart, stacked_bars, success_chart

SVG = "{http://www.w3.org/2000/svg}"


def polylines(svg: str) -> list[np.ndarray]:
    return [
        np.array([[float(v) for v in point.split(",")] for point in line.attrib["points"].split()])
        for line in ET.fromstring(svg).iter(f"{SVG}polyline")
    ]


def test_larger_values_are_drawn_higher_and_later_steps_further_right() -> None:
    (line,) = polylines(success_chart({}, {"rising": {0: 0.0, 1: 1.0, 2: 2.0}}, title="t"))
    assert (np.diff(line[:, 0]) > 0).all()
    assert (np.diff(line[:, 1]) < 0).all()


def test_a_constant_line_lies_in_the_middle_of_its_panel() -> None:
    svg = success_chart({}, {"flat": {0: 7.0, 1: 7.0, 2: 7.0}}, title="t")
    frame = next(r for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.attrib.get("stroke"))
    middle = float(frame.attrib["y"]) + float(frame.attrib["height"]) / 2
    np.testing.assert_allclose(polylines(svg)[0][:, 1], middle, atol=0.1)


def test_a_single_point_is_a_dot_between_its_numbers() -> None:
    svg = ET.fromstring(success_chart({}, {"one": {0: 0.3}}, title="t"))
    (dot,) = svg.iter(f"{SVG}circle")
    frame = next(r for r in svg.iter(f"{SVG}rect") if r.attrib.get("stroke"))
    assert float(dot.attrib["cy"]) == float(frame.attrib["y"]) + float(frame.attrib["height"]) / 2
    assert {"0.15", "0.45"} <= {text.text for text in svg.iter(f"{SVG}text")}, "half of it below and above"


def test_nan_and_inf_are_left_out() -> None:
    (line,) = polylines(success_chart({}, {"a": {0: 0.0, 1: np.nan, 2: 1.0, 3: np.inf}}, title="t"))
    assert len(line) == 2
    assert np.isfinite(line).all()


def test_successes_are_bars_with_their_intervals() -> None:
    bars = {"BC": (1, 4, 0.05, 0.7), "ACRLPD": (3, 4, 0.3, 0.95)}
    svg = ET.fromstring(success_chart(bars, {}, title="t"))
    empty, first, _, second = [rect for rect in svg.iter(f"{SVG}rect") if rect.attrib["height"] == "22"]
    left, whole = float(empty.attrib["x"]), float(empty.attrib["width"])
    np.testing.assert_allclose([float(bar.attrib["width"]) / whole for bar in (first, second)], [0.25, 0.75], atol=1e-3)
    spans = [[float(line.attrib[end]) for end in ("x1", "x2")] for line in svg.iter(f"{SVG}line")]
    np.testing.assert_allclose((np.array(spans[::3]) - left) / whole, [[0.05, 0.7], [0.3, 0.95]], atol=1e-3)
    assert {"BC", "1 of 4", "ACRLPD", "3 of 4"} <= {text.text for text in svg.iter(f"{SVG}text")}


def test_curves_lie_at_their_steps() -> None:
    """Steps need not be evenly spaced."""
    svg = success_chart({}, {"loss": {100: 2.0, 200: 1.0, 500: 0.5}, "nothing yet": {}}, title="t")
    line, nothing = polylines(svg)
    assert not nothing.size
    np.testing.assert_allclose((line[:, 0] - line[0, 0]) / np.ptp(line[:, 0]), [0, 0.25, 1])
    assert {"100", "step 500"} <= {text.text for text in ET.fromstring(svg).iter(f"{SVG}text")}


def test_names_with_markup_are_escaped() -> None:
    svg = success_chart({}, {"<b>&": {0: 0.0, 1: 0.0}}, title="a < b")
    texts = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert "<b>&" in texts
    assert "a < b" in texts


def test_parts_of_a_bar_are_as_wide_as_their_numbers_and_lie_end_to_end() -> None:
    svg = stacked_bars({"a": {"x": 1.0, "y": 3.0}, "b": {"y": 2.0}}, title="t", unit="GB", limit=5.0)
    rects = [r for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    x, width = ([float(r.attrib[name]) for r in rects] for name in ("x", "width"))
    np.testing.assert_allclose(np.array(width) / width[0], [1, 3, 2], rtol=0.01)
    np.testing.assert_allclose(x[0] + width[0], x[1], atol=0.2)
    assert rects[1].attrib["fill"] == rects[2].attrib["fill"] != rects[0].attrib["fill"]
    (first, _) = ET.fromstring(svg).iter(f"{SVG}line")
    np.testing.assert_allclose((float(first.attrib["x1"]) - x[0]) / width[0], 5, rtol=0.01)


def test_curves_of_a_name_have_its_colour_in_every_panel_and_lie_where_their_steps_are() -> None:
    panels = {"a": {"x": {0: 0.0, 10: 1.0}, "y": {0: 1.0, 5: 0.5, 10: 0.0}}, "b": {"y": {0: 7.0, 10: 9.0}}}
    svg = curve_chart(panels, title="t", across="updates")
    x, falling, other = polylines(svg)
    assert falling[1][0] == (x[0][0] + x[1][0]) / 2
    np.testing.assert_allclose(falling[0], [x[0][0], x[1][1]])
    colours = [line.attrib["stroke"] for line in ET.fromstring(svg).iter(f"{SVG}polyline")]
    assert colours[1] == colours[2] != colours[0]
    texts = [text.text for text in ET.fromstring(svg).iter(f"{SVG}text")]
    assert texts.count("y") == 1, "one legend"
    assert {"0", "0.2", "1", "7", "8", "9", "10 updates"} <= set(texts), "round numbers at the sides"
    assert other[0][0] > x[1][0]
