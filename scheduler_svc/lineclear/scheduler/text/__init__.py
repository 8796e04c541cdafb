"""Between text and token ids: tokenizer, chat templates, and tokens back to text one at a time."""
