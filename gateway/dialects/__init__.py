"""The APIs that agents use. Each turns its requests into one `request.GenerationRequest`, and replies into its own form."""
