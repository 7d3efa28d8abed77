//! Who is who: the authority that signs, the enrolment of agents, and the mutual TLS to them.
//!
//! What lives here proves identities and knows nothing of what is then said over the connections.

mod authority;
mod dial;
mod enrollment;

pub use authority::{Authority, AuthorityError, Credentials};
pub use dial::{DialError, Dialer};
pub use enrollment::{Arrival, Enroller, node_of_token};
