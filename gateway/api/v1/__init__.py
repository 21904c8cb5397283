"""`/v1`, what agents call, in the forms of OpenAI and Anthropic: the routes, and the path that a call has in common."""
