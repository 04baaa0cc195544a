"""What several rooms share: text, numbers, JSON, nested values, random states, patches, machine."""
