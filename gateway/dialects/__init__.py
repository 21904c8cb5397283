"""The forms in which agents ask and are answered. What a request asks for is `asked.Asked`; tokens are nobody's business here."""
