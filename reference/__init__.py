"""The generated reference: pages of docs/reference, made from the code that they describe (`make docs`).

Each module makes the pages of one kind, as Markdown; PAGES names them all. Nothing here is part of the product.
"""
