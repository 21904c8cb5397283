"""The form of published weights on disk, which the trainer writes and the gateway checks (docs/topics/weights.md)."""
