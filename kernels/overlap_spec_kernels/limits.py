"""Sizes that several ops have in common. Callers that cannot import torch repeat some; a test compares them."""

MASK_BITS = 64  # of a word of a tree's mask, the keys that a row attends to
MAX_TREE_WIDTH = MASK_BITS  # columns of a window that is a tree, the root included: one word has a bit for each
MAX_CHAIN_WIDTH = 16  # columns of a window that is a chain: one side of a tensor-core product
MAX_GROUP = 16  # query heads of a KV head
MAX_TOPK = 16  # children of a node
MAX_MATCH = 32  # tokens of an n-gram's match
