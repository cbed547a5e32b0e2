"""The overview's table holds every policy to the same limit as predictions and plans do."""

from starlette.datastructures import QueryParams

from app.pages.calculator import answer, read_calculator


def test_fits_as_the_prediction_says() -> None:
    shown = answer(read_calculator(QueryParams("model=llama-2-7b&gpu=a100-80gb&micro_batch=1&seq=4096")))
    assert shown is not None
    for row in shown.rows:
        assert row.result is not None
        assert row.result.fits is not None
        assert row.fits == row.result.fits.fits
        assert row.headroom_bytes == row.result.fits.headroom_bytes
        assert shown.limit_bytes == row.result.fits.limit_bytes
