"""Limits on sizes that several ops share. Callers that cannot import torch repeat some; a test compares them."""

MASK_BITS = 64  # bits in a word of a tree's attention mask, one for each key
MAX_TREE_WIDTH = MASK_BITS  # columns of a tree's window, root included: one mask word has a bit for each
MAX_CHAIN_WIDTH = 16  # columns of a chain's window, root included: one side of a tensor-core product
MAX_GROUP = 16  # query heads per KV head
MAX_TOPK = 16  # children of a node
MAX_TOP_TOKENS = 20  # of a row, with their log-probs: as many as OpenAI's API returns
NO_TOKEN = -2  # what is drawn where the largest logit is NaN or infinite; -1 pads runs of tokens
MAX_MATCH = 32  # tokens in an n-gram match
