"""`blockcast chat`: a conversation with a served model in a terminal, its canvas filling as one watches.

Speaks HTTP alone, and imports nothing heavy: client.py is the wire, answer.py what is known of one answer, view.py what
a terminal shows of it, command.py the command.
"""
