"""The demo with tools: a model learns to use a tool to the end, behind an agent of the openai-agents SDK."""
