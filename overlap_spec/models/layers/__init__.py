"""The layers that targets and drafts are made of."""
