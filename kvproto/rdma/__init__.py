"""RDMA WRITE through pyverbs: one file for each rung, from the port to the writer.

    ports       which devices this host has, and which port and address to use
    verbs       pyverbs, loaded on first use; the only file that imports it
    device      an open device and its protection domain; its events
    memory      registered memory, and the staging memory for what is not
    completion  completions, by an event of the loop
    queue_pair  a connection, from RESET to RTS and to its end
    host        the owner: offers its pool, gives keys to it, takes them back
    writer      the writer: attaches, writes, announces

Of the rest of the package only ``kvproto.client`` imports it. Source: docs/wire.md section 6,
docs/rdma.md.
"""
