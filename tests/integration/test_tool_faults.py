"""A reply that looks like a tool call and cannot be parsed: recorded, counted, shown by `why` and by `gateway doctor`."""

from __future__ import annotations

from pathlib import Path

from gateway.doctor.machine import examine_database
from tests.harness.scripted import TOOL_CALL, TOOLS, USER, scripted_gateway

WRONG = '<tool_call>\n{"name": "add", "arguments": }\n</tool_call>'


async def test_an_unparsed_call_is_shown_everywhere(tiny_model: Path, tmp_path: Path) -> None:
    async with scripted_gateway(tiny_model, tmp_path) as (gateway, engine):
        engine.replies.extend([TOOL_CALL, WRONG, WRONG])
        episode, headers = await gateway.open()
        for body in ({"tools": TOOLS}, {"tools": TOOLS}, {}):
            reply = await gateway.chat(headers, messages=[USER], max_tokens=400, **body)
            assert reply.is_success, reply.text
        why = await gateway.admin.why(episode)
        (fault,) = why["tool_faults"]
        assert fault["faults"] == ["unparsed"] and "looks like a tool call" in fault["words"][0]
        metrics = (await gateway.http.get("/metrics")).text
        assert 'headgate_tool_faults_total{fault="unparsed"} 1.0' in metrics
        found = await examine_database(gateway.settings)
        assert [f.what for f in found if f.level == "warning"] == [
            "1 replies of the last day: the reply looks like a tool call and is none in the form of the model's template"
            " (docs/topics/templates.md)"
        ]
