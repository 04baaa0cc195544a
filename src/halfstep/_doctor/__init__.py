"""What a careful colleague would say of a training: its objects, its source, and the machine.

``objects`` and ``source`` turn what they look at into findings; ``machine`` measures.
"""
