"""The agent of the tutorial (docs/guide/tutorial.md): an assistant of the openai-agents SDK with a calculator."""
