"""Models made on the spot: `tiny` builds one, `tokenizer` its words, `expert` the episodes it imitates, `folder` puts it in place."""
