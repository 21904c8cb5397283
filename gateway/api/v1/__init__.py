"""The routes that agents call: `/v1`, in the forms of OpenAI and Anthropic."""
