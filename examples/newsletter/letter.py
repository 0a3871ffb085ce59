"""The message that each recipient gets, with personal fields."""

from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from string import Template

from .recipients import Recipient

SENDER = "news@example.org"

TEXT = Template("""\
Dear $name,

the spring has come, and this letter has come to you once.

To be taken off our list: $link
""")


def letter(mailing: str, recipient: Recipient) -> str:
    """The message for one recipient, the same each time, as it is sent.

    Args:
        mailing: the mailing's name.
        recipient: who gets it.

    Raises:
        ValueError: the name or the address cannot stand in a message.
    """
    link = f"https://example.org/unsubscribe/{mailing}/{recipient.id}"
    message = EmailMessage(policy=SMTP)
    message["From"] = SENDER
    message["To"] = Address(recipient.name, addr_spec=recipient.email)
    message["Subject"] = "What is new this spring"
    message["Date"] = "Sun, 01 Mar 2026 09:00:00 +0000"
    message["Message-ID"] = f"<{mailing}.{recipient.id}@example.org>"
    message["List-Unsubscribe"] = f"<{link}>"
    message.set_content(TEXT.substitute(name=recipient.name, link=link), cte="quoted-printable")
    return message.as_string()
