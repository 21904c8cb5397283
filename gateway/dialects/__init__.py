"""The APIs that agents speak. Each turns its requests into one `request.GenerationRequest`, and replies into its own form."""
