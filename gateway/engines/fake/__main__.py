"""`python -m gateway.engines.fake`: one fake engine on a port of the loopback interface."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from gateway.engines.fake import FakeEngine, Faults, create_fake_app, create_fake_sglang_app
from gateway.engines.fake.log import SampleLog

_APPS = {"vllm": create_fake_app, "sglang": create_fake_sglang_app}


def main() -> None:
    """Serve one fake engine."""
    parser = argparse.ArgumentParser(prog="python -m gateway.engines.fake", description=__doc__)
    parser.add_argument("--weights", required=True, help="a checkpoint directory")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="the address to listen on; requests need no key, so let only gateways reach it",
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--api", choices=_APPS, default="vllm", help="the engine whose API is served")
    parser.add_argument("--delay-s", type=float, default=0.0, help="seconds per token")
    parser.add_argument(
        "--hold-after", type=int, help="every request stops when it has sampled this many tokens"
    )
    parser.add_argument("--log", type=Path, help="append requests and sampled tokens to this file")
    parser.add_argument("--first-mark", type=int, default=1, help="the first of the log's marks")
    parser.add_argument(
        "--enable-return-routed-experts",
        action="store_true",
        help="report the experts of tokens, as vLLM does",
    )
    options = parser.parse_args()
    if not math.isfinite(options.delay_s) or options.delay_s < 0:
        parser.error("--delay-s must be a number of seconds")

    import uvicorn

    log = SampleLog(options.log, options.first_mark) if options.log else None
    engine = FakeEngine(
        options.weights,
        Faults(delay_s=options.delay_s, hold_after=options.hold_after),
        log,
        returns_routes=options.enable_return_routed_experts,
    )
    app = _APPS[options.api](engine)
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    main()
