"""Python source as it is read: what names mean, and which calls run where. Nothing is executed."""
