"""Model families without their models: templates, and tokenizers made here that have the families' marks."""
