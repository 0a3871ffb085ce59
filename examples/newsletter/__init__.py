"""A mailing that is made in parallel, and sent only when all of it is made, once: `make newsletter`.

| file | what it is |
|---|---|
| `recipients.py` | who gets it: a database with tags, read by ranges of ids |
| `people.py` | people who are made up, to fill it |
| `letter.py` | the message that each of them gets |
| `spool.py` | the messages of a chunk, in a file that is there as a whole or not at all |
| `journal.py` | what the SMTP server has accepted, a byte for each recipient |
| `making.py` | makes one chunk |
| `sending.py` | sends all chunks, from where the journal ends |
| `app.py` | the two tasks, each with its decorator, and the chord |
| `smtp_server.py` | an SMTP server on loopback, which writes down what it accepts |
| `places.py` | where all of this is kept |
| `house.py` | runs it: servers, worker, and what comes of it |
| `progress.py`, `summary.py` | what people are shown |

docs/newsletter.md goes through it line by line.
"""
