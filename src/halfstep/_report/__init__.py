"""A recorded run told to a person: numbers, sentences, a page, and what differs from another."""
