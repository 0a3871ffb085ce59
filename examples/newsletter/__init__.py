"""A mailing that is made in parallel, and sent only when all of it is made, once: `make newsletter`.

| file | what it is |
|---|---|
| `app.py` | the two tasks, each with its decorator, and the chord |
| `recipients.py` | who gets it: a database, read by ranges of ids |
| `letter.py` | the message that each of them gets |
| `making.py` | makes a chunk: its messages, in a file that is there as a whole or not at all |
| `sending.py` | sends all chunks, and keeps a journal of it, from where the next run goes on |
| `smtp_server.py` | an SMTP server on loopback, which writes down what it accepts |
| `__main__.py` | runs it: servers, worker, and what comes of it |

README.md beside it says what each line is for.
"""
