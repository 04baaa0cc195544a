"""What several rooms share: text, numbers, JSON, random states, patches, the machine."""
