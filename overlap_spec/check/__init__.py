"""What a model would run on, and what is refused, from configs and headers alone (`overlap-spec check`).

No list of refusals is here. The flags go through `resolve`, the files through the loaders on the device `meta`, which
has shapes and types but no values, the sizes through the worker's budget, and the tokenizer is loaded as it is served.
"""
