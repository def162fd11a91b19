"""GET /metrics: in the format that is asked for, and never a whole scrape in one turn of the event loop."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from frontend.endpoints import metrics
from tests.helpers.frontend_server import RunningFrontend


def test_the_format_follows_what_the_scraper_accepts(frontend: RunningFrontend) -> None:
    plain = frontend.client.get("/metrics")
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert plain.text.endswith("\n")
    assert "# EOF" not in plain.text
    openmetrics = frontend.client.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.text.endswith("# EOF\n")


def test_others_have_their_turns_while_it_is_written(frontend: RunningFrontend) -> None:
    async def turns() -> int:
        request = Request({"type": "http", "method": "GET", "path": "/metrics", "headers": []})
        scrape = asyncio.create_task(metrics.handle(request, frontend.services))
        count = 0
        while not scrape.done():
            await asyncio.sleep(0)
            count += 1
        assert (await scrape).status_code == 200
        return count

    assert asyncio.run(turns()) >= 4
