"""The bus: fresh state that gateway processes share and that may be lost at any moment."""
