"""The HTML page of all runs."""

import math

from regard.lab import page
from regard.lab.figures import Axis
from support.lab import made_up_run


def test_the_page_shows_everything_and_contains_no_script(tmp_path):
    run = made_up_run(tmp_path / "made-up")
    for setting, seed in run.cells():
        run.measure(setting, seed)
    assert run.conclude()["complete"]
    made = page.to_html(page.read_conclusions(tmp_path))
    assert "<script" not in made and "&lt;script&gt;" in made and "Loss &lt;b&gt;" in made
    assert made.count("<svg viewBox") == 2 and made.count("<polyline") == 2 and "x &amp; y" in made
    assert "dropout hurts" in made and "http://" not in made and "https://" not in made
    assert "regard lab run made-up" in made
    assert "None" not in made and ">nan" not in made and '"nan' not in made


def test_axes_have_round_ticks():
    assert Axis([0.0, 10.0], 0, 100, False).ticks() == [0, 2, 4, 6, 8, 10]
    assert Axis([1.0, 100.0], 0, 100, True).ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert Axis([3.0], 0, 100, False)(3.0) == 50
    for values in ([], [math.inf], [0.0, 0.0], [-1e-9, 1e-9], [2.0, 2.5]):
        assert len(Axis(values, 0, 100, False).ticks()) <= 12
