"""A deterministic engine for tests, benches and fault injection, behind the APIs of real ones. It is not a model."""

from gateway.engines.fake.engine import FakeEngine
from gateway.engines.fake.faults import Faults
from gateway.engines.fake.sampling import VOCABULARY, identity, next_token, token_logprob
from gateway.engines.fake.sglang_api import create_fake_sglang_app
from gateway.engines.fake.vllm_api import create_fake_app

__all__ = [
    "VOCABULARY",
    "FakeEngine",
    "Faults",
    "create_fake_app",
    "create_fake_sglang_app",
    "identity",
    "next_token",
    "token_logprob",
]
