"""OpenAI's Responses API without storage, over chat completions."""
