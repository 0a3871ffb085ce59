"""The message that each recipient gets: text and HTML with personal fields, by the standard library."""

from __future__ import annotations

from email.errors import MessageError
from email.headerregistry import Address
from email.message import EmailMessage, Message
from email.policy import SMTP
from html import escape
from string import Template

from .recipients import Recipient

SENDER = "news@example.org"
LONGEST_LINE = 998
SUBJECT = "What is new this spring"
DATE = "Sun, 01 Mar 2026 09:00:00 +0000"

TEXT = Template("""\
Dear $name,

the days are getting longer, and so is the list of what is new:

- The feed importer no longer imports a feed twice.
- The nightly report is made once a night, on however many machines.
- This letter has come to you once, too.

Those who have been with us for a while know how it was before that.
If anything is missing, answer this letter: somebody reads it.

Kind regards,
the people at example.org

You get this because $email is on our list.
To be taken off it: $link
""")

HTML = Template("""\
<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>What is new this spring</title></head>
<body style="font-family: sans-serif; max-width: 40em; margin: auto">
<p>Dear $name,</p>
<p>the days are getting longer, and so is the list of what is new:</p>
<ul>
<li>The feed importer no longer imports a feed twice.</li>
<li>The nightly report is made once a night, on however many machines.</li>
<li>This letter has come to you once, too.</li>
</ul>
<p>Those who have been with us for a while know how it was before that.
If anything is missing, answer this letter: somebody reads it.</p>
<p>Kind regards,<br>the people at example.org</p>
<p style="color: gray; font-size: small">You get this because $email is on our list.<br>
<a href="$link">Take me off it</a></p>
</body>
</html>
""")


class BadRecipientError(ValueError):
    """Somebody who cannot be written to, because of the name or the address."""


class Letter:
    """The letter of one mailing; its message is made once, and filled in for each recipient.

    Args:
        mailing: the mailing's name.
    """

    def __init__(self, mailing: str) -> None:
        self._mailing = mailing
        self._message = EmailMessage(policy=SMTP)
        for field in ("To", "Message-ID", "List-Unsubscribe"):
            self._message[field] = ""
        self._message["From"] = Address("example.org", addr_spec=SENDER)
        self._message["Subject"] = SUBJECT
        self._message["Date"] = DATE
        self._message.set_content("", cte="8bit")
        self._message.add_alternative("", subtype="html", cte="8bit")
        self._message.set_boundary(f"==={mailing}===")
        self._text, self._html = self._message.iter_parts()

    def to(self, recipient: Recipient) -> bytes:
        """The message for one recipient, the same each time, as it is sent.

        Args:
            recipient: who gets it.

        Returns:
            The message by RFC 822, with CRLF.

        Raises:
            BadRecipientError: the name or the address cannot stand in a message.
        """
        link = f"https://example.org/unsubscribe/{self._mailing}/{recipient.id}"
        fields = {"name": recipient.name, "email": recipient.email, "link": link}
        try:
            self._message.replace_header("To", Address(recipient.name, addr_spec=recipient.email))
            self._message.replace_header("Message-ID", f"<{self._mailing}.{recipient.id}@example.org>")
            self._message.replace_header("List-Unsubscribe", f"<{link}>")
            _fill(self._text, TEXT.substitute(fields))
            _fill(self._html, HTML.substitute({key: escape(value) for key, value in fields.items()}))
            return self._message.as_bytes()
        except (MessageError, ValueError, IndexError) as error:
            msg = (
                f"recipient {recipient.id} cannot be written to, as {recipient.name!r} at {recipient.email!r}: {error}"
            )
            raise BadRecipientError(msg) from error


def _fill(part: Message, text: str) -> None:
    """Give a part another text; its headers stay, which takes half the time of `set_content`.

    Raises:
        ValueError: a line is longer than a message may have.
    """
    if max(map(len, text.encode().splitlines())) > LONGEST_LINE:
        msg = f"a line is longer than {LONGEST_LINE} bytes"
        raise ValueError(msg)
    part.set_payload(text.encode().decode("ascii", "surrogateescape"))  # as the library keeps 8 bits itself
