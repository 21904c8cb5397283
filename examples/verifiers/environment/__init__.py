"""An environment as people write them for verifiers, with nothing of headgate. The demo puts this folder on PYTHONPATH."""
